"""The R-worker memory that sequences need at the load-stabilizing schedule's peak (FastDecode's equation 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.perfmodel import equations
from fastdecode.perfmodel.load import barrier
from fastdecode.perfmodel.sizing import Workload


@dataclass(frozen=True)
class CacheRoom:
    """Computes the peak load of one workload, and how many R-workers have the memory for it.
    ``capacity_tokens``: cached tokens that fit on one R-worker. ``state_tokens``: cached tokens that need as much
    memory as one sequence's states. ``copies``: copies of each segment. ``interval_steps``: steps between the starts of
    two micro-batches; None means the default.
    """

    workload: Workload
    capacity_tokens: float
    state_tokens: float
    copies: int
    interval_steps: int | None

    def interval(self, in_flight: int) -> int:
        """Return the number of steps from one micro-batch to the next."""
        return self.interval_steps or equations.default_interval_steps(in_flight, self.workload.output_len)

    def micro_batch(self, in_flight: int) -> int:
        """Return how many sequences start together."""
        return max(1, round(equations.micro_batch_size(in_flight, self.workload.output_len, self.interval(in_flight))))

    def load_limit(self, in_flight: int, num_r_workers: int) -> int:
        """Return the KV load limit for the scheduler: the schedule's peak load, or more if there are prompts.
        While its prompt is computed, a sequence is in flight but adds no load. So the limit counts 1/32 more sequences
        than ``in_flight``, or as many on every R-worker as on the fullest, whichever is more. The scheduler gives each
        R-worker an equal part of the limit, so the limit is multiplied by the busiest R-worker's load over the mean
        (``barrier``).
        """
        if not self.workload.prompt_len:
            return self._peak(in_flight)
        uneven = num_r_workers * math.ceil(in_flight / num_r_workers) - in_flight
        peak = self._peak(in_flight, max(1, round(in_flight / 32), uneven))
        each = (in_flight + uneven) / num_r_workers
        return round_up(peak * barrier(num_r_workers, each, self.workload.context_spread))

    def _peak(self, in_flight: int, waiting: int = 0) -> int:
        """Return the peak load, in cached tokens, of ``in_flight`` + ``waiting`` sequences.
        The result is at least the length of one sequence, since under a lower limit no sequence could run.
        """
        output_len = self.workload.output_len
        before = self.workload.mean_context - output_len / 2.0  # the prompt, and more if outputs differ
        interval = self.interval(in_flight)
        peak = equations.peak_load_stabilized(in_flight + waiting, output_len, interval, before)
        return round_up(max(peak, self.workload.seq_len))

    def memory_r_workers(self, in_flight: int) -> int:
        """Return how many R-workers have the memory for the peak load (equation 9).
        All sequences of an R-worker share one stored prefix, but each second copy stores the prefix again.
        """
        shared, copies = self.workload.shared_prefix_len, self.copies - 1
        peak_context = self._peak(in_flight) / in_flight
        held = peak_context - shared + copies * peak_context + self.copies * self.state_tokens
        needed = round_up(equations.memory_r_workers(in_flight, held, self.capacity_tokens - shared))
        return max(needed, self.copies)


def round_up(number: float) -> int:
    """Return ``number`` rounded up, but not because of a rounding error just above an integer."""
    return math.ceil(number - 1e-9 * abs(number))
