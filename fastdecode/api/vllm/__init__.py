"""vLLM's settings, flags, methods and environment variables that have no counterpart here."""
