"""Prefill workers as processes: what travels to and from them, the pool that the engine calls, and their own end."""
