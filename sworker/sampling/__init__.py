"""Sampling: one token per row from the logits of a step. A row's token does not depend on its batch."""

from fastdecode.sworker.sampling.logits import SamplingRow
from fastdecode.sworker.sampling.probabilities import sample_seed
from fastdecode.sworker.sampling.sampler import SampledToken, Sampler, distribution

__all__ = ["SampledToken", "Sampler", "SamplingRow", "distribution", "sample_seed"]
