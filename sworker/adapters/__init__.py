"""Adapters hand q, k, v or the rows of states from unmodified modules to the pipeline, one per kind or family."""
