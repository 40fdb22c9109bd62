"""Prefill workers as processes: their messages, the pool that the engine calls, and the worker's side."""
