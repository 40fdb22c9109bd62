"""Composition: the only package where an engine's parts are made and joined."""
