"""Prompts on prefill workers: the engine's side and the prefill worker's side."""
