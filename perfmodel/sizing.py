"""The question and the answer of a plan: how many R-workers this workload wants, and what comes of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.service import Service

MOST_TOKENS = 1e12
"""Most tokens of a sequence: more than any memory holds, and few enough for arithmetic."""

LARGEST_OUTPUT_LEN_CV = 100.0
"""Largest deviation of outputs' lengths; real traffic lies below 5, and n sequences have at most sqrt(n - 1)."""


@dataclass(frozen=True)
class Workload:
    """Sequences of ``seq_len`` tokens on average, the first ``prompt_len`` of them given.

    ``output_len_cv``: standard deviation of the output's length over its mean (0: all alike, 1: exponential).
    ``shared_prefix_len``: tokens at the start that every prompt shares, computed and read once per R-worker.
    ``remote_prompts``: prefill workers compute the prompts, and the S-worker none.
    """

    seq_len: float
    prompt_len: float = 0.0
    output_len_cv: float = 0.0
    shared_prefix_len: float = 0.0
    remote_prompts: bool = False

    def __post_init__(self) -> None:
        for name in ("seq_len", "prompt_len", "output_len_cv", "shared_prefix_len"):
            value = getattr(self, name)
            if not math.isfinite(value) or value < 0:
                raise ConfigError(f"{name} must be a number of at least 0, not {value!r}")
        if self.seq_len > MOST_TOKENS:
            raise ConfigError(f"seq_len (prompt + output) must be at most {MOST_TOKENS:g} tokens, not {self.seq_len:g}")
        if self.output_len_cv > LARGEST_OUTPUT_LEN_CV:
            raise ConfigError(
                f"output_len_cv (standard deviation over mean) must be at most {LARGEST_OUTPUT_LEN_CV:g}, "
                f"not {self.output_len_cv:g}"
            )
        if self.output_len < 1:
            raise ConfigError(
                f"seq_len (prompt + output) is {self.seq_len:g} and must be at least prompt_len + 1 = "
                f"{self.prompt_len + 1:g}"
            )
        if self.shared_prefix_len > self.prompt_len:
            raise ConfigError(
                f"shared_prefix_len ({self.shared_prefix_len:g}) must be at most prompt_len ({self.prompt_len:g})"
            )

    @property
    def output_len(self) -> float:
        """Mean tokens generated, and so decode steps, per sequence."""
        return self.seq_len - self.prompt_len

    @property
    def mean_context(self) -> float:
        """Cached tokens a running sequence attends to, averaged over the steps of all sequences.

        The paper's S/2 without prompts. Of unequal sequences the long ones run longer, and weigh more:
        p + E[o²]/(2·E[o]) = p + ō·(1 + cv²)/2.
        """
        return self.prompt_len + self.output_len * (1.0 + self.output_len_cv**2) / 2.0

    @property
    def context_spread(self) -> float:
        """The standard deviation of a running sequence's context over its mean.

        An output of length o is seen at an age that is uniform over it, and long outputs are seen for longer. With
        gamma-distributed lengths E[age] = o(1 + v)/2 and E[age^2] = o^2(1 + v)(1 + 2v)/3, where v is the square of
        ``output_len_cv``.
        """
        squared = self.output_len_cv**2
        variance = (1.0 + squared) * (1.0 + 2.0 * squared) / 3.0 - ((1.0 + squared) / 2.0) ** 2
        return self.output_len * math.sqrt(variance) / self.mean_context

    @property
    def prompt_context(self) -> float:
        """Tokens before the mean row of a prompt that is computed: those of a shared prefix are not."""
        return (self.shared_prefix_len + self.prompt_len) / 2.0

    def read_share(self, windows: Sequence[int], chunked: bool = False) -> float:
        """Return the part of a context that the mean layer reads: a layer with a window w reads the mean of min(c, w).

        ``windows``: of each layer, 0 if it has none. Where they are lengths of chunks (``chunked``), it reads the mean
        of c mod w. Contexts c are taken as spread evenly around their mean, from the prompt on.
        """
        read = [self._seen_tokens(window, chunked) for window in windows]
        return sum(read) / len(read) / self.mean_context if read else 1.0

    def _seen_tokens(self, window: int, chunked: bool) -> float:
        first, last = self.prompt_len, 2.0 * self.mean_context - self.prompt_len
        if not 0 < window < last:
            return self.mean_context
        if chunked:
            return (_read_in_chunks(last, window) - _read_in_chunks(first, window)) / (last - first)
        return window - max(window - first, 0.0) ** 2 / (2.0 * (last - first))

    @property
    def rows_per_output_token(self) -> float:
        """Rows the S-worker computes per token generated: the token's, and its share of a prompt not yet cached."""
        if self.remote_prompts:
            return 1.0
        return 1.0 + (self.prompt_len - self.shared_prefix_len) / self.output_len


def _read_in_chunks(num_tokens: float, chunk: int) -> float:
    """Return the tokens that queries at all contexts up to ``num_tokens`` read, each from its chunk's beginning on."""
    whole, rest = divmod(num_tokens, chunk)
    return (whole * chunk**2 + rest**2) / 2.0


@dataclass(frozen=True)
class Prices:
    """Per hour, in any currency: each of the S-worker's ``num_gpus``, and one host of R-workers. None: not known."""

    gpu_per_hour: float | None = None
    cpu_host_per_hour: float | None = None
    num_gpus: int = 1

    def __post_init__(self) -> None:
        for name in ("gpu_per_hour", "cpu_host_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"a price must be a number of at least 0, not {value!r}")

    def per_million_tokens(self, num_hosts: int, tokens_per_second: float) -> float | None:
        """Return the price of output tokens with ``num_hosts`` hosts beside the GPUs; None if a price is missing."""
        if self.gpu_per_hour is None or not tokens_per_second or (num_hosts and self.cpu_host_per_hour is None):
            return None
        per_hour = self.num_gpus * self.gpu_per_hour + num_hosts * (self.cpu_host_per_hour or 0.0)
        return per_hour / 3600.0 / tokens_per_second * 1e6


NO_PRICES = Prices()


@dataclass(frozen=True)
class Candidate:
    """The figures of one number of R-workers (of each rank); ``s_busy`` and ``r_busy`` are fractions of the step."""

    num_r_workers: int
    num_hosts: int
    step_seconds: float
    output_tokens_per_second: float
    sequence_seconds: float
    s_busy: float
    r_busy: float
    bottleneck: str
    fits_memory: bool
    price_per_million_tokens: float | None


@dataclass(frozen=True)
class Plan(Candidate):
    """The answer, the chosen number of R-workers, with the names of the JSON contract.

    ``num_r_workers_exact``: by equation 11, unrounded; ``num_r_workers`` is more where memory needs more
    (``r_workers_set_by``). Both count those of one rank: ``tensor_parallel_size`` ranks have ``total_r_workers``, and
    each holds a rank's heads of its sequences. ``micro_batch_size`` sequences start every ``interval_steps`` steps,
    which keeps the load below ``kv_load_limit`` cached tokens over all R-workers. ``kv_bytes_per_token`` (held),
    ``kv_bytes_read_per_token`` (in a step, for each token of a context), ``state_bytes_per_sequence`` (of recurrent
    layers, read and written in each step) and ``r_worker_bandwidth_gb_per_s`` are of one R-worker;
    ``r_workers_bound_by``: "reads" or "arithmetic"; ``r_workers_arithmetic_over_reads``: seconds of multiply-adds over
    those of reading, of rows or an index's keys, whichever take longer. ``kv_replicas``: R-workers that each sequence
    is cached on. ``ttft_seconds``: time to the first token of a request that finds a free seat and no other prompt.
    """

    mini_batch_size: int
    in_flight: int
    num_mini_batches: int
    num_r_workers_exact: float
    r_workers_set_by: str
    micro_batch_size: int
    interval_steps: int
    kv_load_limit: int
    kv_bytes_per_token: int | None
    r_worker_bandwidth_gb_per_s: float | None
    candidates: tuple[Candidate, ...]
    tensor_parallel_size: int = 1
    total_r_workers: int = 0
    kv_replicas: int = 1
    kv_bytes_read_per_token: float | None = None
    r_workers_bound_by: str | None = None
    r_workers_arithmetic_over_reads: float | None = None
    state_bytes_per_sequence: int = 0
    ttft_seconds: float = 0.0

    @property
    def service(self) -> Service:
        """The plan as its users see it; a step gives each of them one token."""
        return Service(
            self.in_flight, self.output_tokens_per_second, self.step_seconds, self.ttft_seconds,
            self.price_per_million_tokens,
        )  # fmt: skip
