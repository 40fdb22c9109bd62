"""Adapters between unmodified modules and the pipeline, one per kind or family.

They pass q, k and v, or a recurrent layer's rows, from the module to the pipeline.
"""
