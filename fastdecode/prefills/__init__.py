"""Prompts on prefill workers: the engine's side and the worker's side."""
