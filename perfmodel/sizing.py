"""The input and the result of a plan: a workload, and how many R-workers it needs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.service import Service


@dataclass(frozen=True)
class Workload:
    """Sequences of ``seq_len`` tokens on average, of which the first ``prompt_len`` are given.

    ``output_len_cv``: the output length's standard deviation divided by its mean (0: all equal, 1: exponential).
    ``shared_prefix_len``: tokens at the start that all prompts share, computed once, and read once per R-worker.
    ``remote_prompts``: prefill workers compute all prompts.
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
        # Most tokens of a sequence: more than any memory holds, and small enough for float arithmetic
        most_tokens = 1e12
        if self.seq_len > most_tokens:
            raise ConfigError(f"seq_len (prompt + output) must be at most {most_tokens:g} tokens, not {self.seq_len:g}")
        # Largest accepted value; that of real traffic is below 5, and that of n sequences at most sqrt(n - 1)
        largest_output_len_cv = 100.0
        if self.output_len_cv > largest_output_len_cv:
            raise ConfigError(
                f"output_len_cv (standard deviation over mean) must be at most {largest_output_len_cv:g}, "
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
        """Mean tokens generated per sequence, which equals its decode steps."""
        return self.seq_len - self.prompt_len

    @property
    def mean_context(self) -> float:
        """Cached tokens that a running sequence attends to, averaged over the steps of all sequences.

        It is the paper's S/2 without prompts. Among unequal sequences, the long ones run longer and weigh more:
        p + E[o²]/(2·E[o]) = p + ō·(1 + cv²)/2.
        """
        return self.prompt_len + self.output_len * (1.0 + self.output_len_cv**2) / 2.0

    @property
    def context_spread(self) -> float:
        """Standard deviation of a running sequence's context, divided by its mean.

        At any moment, a running output of length o has a uniform age from 0 to o, and long outputs run longer. With
        gamma-distributed lengths E[age] = o(1 + v)/2 and E[age^2] = o^2(1 + v)(1 + 2v)/3, where v is the square of
        ``output_len_cv``.
        """
        squared = self.output_len_cv**2
        variance = (1.0 + squared) * (1.0 + 2.0 * squared) / 3.0 - ((1.0 + squared) / 2.0) ** 2
        return self.output_len * math.sqrt(variance) / self.mean_context

    @property
    def prompt_context(self) -> float:
        """Mean number of tokens before a computed row of a prompt. Rows of a shared prefix are not computed."""
        return (self.shared_prefix_len + self.prompt_len) / 2.0

    def read_share(self, windows: Sequence[int], chunked: bool = False) -> float:
        """Return the fraction of a context that the mean layer reads.
        A layer with window w reads the mean of min(c, w). ``windows``: of each layer; 0 for none. With ``chunked`` they
        are lengths of chunks, and a layer reads the mean of c mod w. Contexts c are assumed to be spread evenly around
        their mean, from the prompt on.
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
        """Rows that the S-worker computes per output token: one decode row, and a share of the uncached prompt."""
        if self.remote_prompts:
            return 1.0
        return 1.0 + (self.prompt_len - self.shared_prefix_len) / self.output_len


def _read_in_chunks(num_tokens: float, chunk: int) -> float:
    """Return how many tokens ``num_tokens`` consecutive queries read together, each from its chunk's beginning on."""
    whole, rest = divmod(num_tokens, chunk)
    return (whole * chunk**2 + rest**2) / 2.0


@dataclass(frozen=True)
class Prices:
    """Prices per hour in any currency: of each of the S-worker's ``num_gpus``, and of an R-worker host.

    None: unknown.
    """

    gpu_per_hour: float | None = None
    cpu_host_per_hour: float | None = None
    num_gpus: int = 1

    def __post_init__(self) -> None:
        for name in ("gpu_per_hour", "cpu_host_per_hour"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"a price must be a number of at least 0, not {value!r}")

    def per_million_tokens(self, num_hosts: int, tokens_per_second: float) -> float | None:
        """Return the price of a million output tokens with ``num_hosts`` hosts and the GPUs; None if unknown."""
        if self.gpu_per_hour is None or not tokens_per_second or (num_hosts and self.cpu_host_per_hour is None):
            return None
        per_hour = self.num_gpus * self.gpu_per_hour + num_hosts * (self.cpu_host_per_hour or 0.0)
        return per_hour / 3600.0 / tokens_per_second * 1e6


NO_PRICES = Prices()


@dataclass(frozen=True)
class Candidate:
    """A plan's figures for one number of R-workers (per rank). ``s_busy``, ``r_busy``: busy fractions of a step."""

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
    """A plan: the chosen number of R-workers, and figures with the names that ``--output-json`` uses.
    ``num_r_workers_exact``: by equation 11, unrounded. ``num_r_workers``: more if memory needs more
    (``r_workers_set_by``). Both are per rank: ``tensor_parallel_size`` ranks have ``total_r_workers``, each with one
    rank's heads of some sequences. ``micro_batch_size`` sequences start every ``interval_steps`` steps, which keeps the
    load below ``kv_load_limit`` cached tokens over all R-workers. Of one R-worker: ``kv_bytes_per_token`` (held),
    ``kv_bytes_read_per_token`` (per step and token of context), ``state_bytes_per_sequence`` (of recurrent layers, read
    and written per step), and ``r_worker_bandwidth_gb_per_s``. ``r_workers_bound_by``: "reads" or "arithmetic".
    ``r_workers_arithmetic_over_reads``: seconds of multiply-adds divided by those of reading, for rows or for an
    index's keys, whichever take longer. ``kv_replicas``: R-workers per sequence. ``ttft_seconds``: time to first token
    of a request that starts at once, while no other prompt is computed.
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
        """The plan as its users see it. A step gives each user one token."""
        return Service(
            self.in_flight, self.output_tokens_per_second, self.step_seconds, self.ttft_seconds,
            self.price_per_million_tokens,
        )  # fmt: skip
