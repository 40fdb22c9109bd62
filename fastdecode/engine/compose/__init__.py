"""Composition: the only place where an engine's parts are made and joined."""
