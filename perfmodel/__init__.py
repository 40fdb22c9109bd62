"""The performance model: what a machine can do and what a model needs, in numbers.

It imports neither torch nor cluster.
"""
