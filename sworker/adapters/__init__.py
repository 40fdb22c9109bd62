"""Adapters between unmodified modules and the pipeline, one per kind or family.

They hand over q, k, v, or rows of states.
"""
