"""Tensor parallelism: several S-worker processes, the ranks, each with its own group of R-workers.

Rank 0 has the engine, the scheduler and the sampler; the others follow it step by step.
"""
