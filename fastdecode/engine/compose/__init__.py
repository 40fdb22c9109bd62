"""Composition: an engine's parts are made and joined here, and nowhere else."""
