"""The memory that sequences take on R-workers at the peak of the load-stabilizing schedule (equation 9)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.perfmodel import equations
from fastdecode.perfmodel.load import barrier
from fastdecode.perfmodel.sizing import Workload


@dataclass(frozen=True)
class CacheRoom:
    """The schedule's peak for one workload, and the R-workers whose memory holds it.

    ``capacity_tokens``: cached tokens that one R-worker holds. ``state_tokens``: cached tokens that take the memory of
    one sequence's states. ``copies``: per sequence. ``interval_steps``: between micro-batches; None: the default.
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
        """Return the limit of the KV load: the schedule's peak.

        With prompts the limit is higher, since a lower one would keep seats empty. It counts 1/32 more sequences, which
        hold seats while their prompts are computed, or as many on each R-worker as on the fullest, whichever is more.
        It is scaled to the busiest R-worker's expected load (``barrier``), as each R-worker has an equal part of it.
        """
        if not self.workload.prompt_len:
            return self._peak(in_flight)
        uneven = num_r_workers * math.ceil(in_flight / num_r_workers) - in_flight
        peak = self._peak(in_flight, max(1, round(in_flight / 32), uneven))
        each = (in_flight + uneven) / num_r_workers
        return round_up(peak * barrier(num_r_workers, each, self.workload.context_spread))

    def _peak(self, in_flight: int, waiting: int = 0) -> int:
        """Return the schedule's peak load with ``waiting`` sequences beside those in flight.

        The result is at least one whole sequence, since under a lower limit no sequence could run.
        """
        output_len = self.workload.output_len
        before = self.workload.mean_context - output_len / 2.0  # the prompt, and the context that unequal outputs add
        interval = self.interval(in_flight)
        peak = equations.peak_load_stabilized(in_flight + waiting, output_len, interval, before)
        return round_up(max(peak, self.workload.seq_len))

    def memory_r_workers(self, in_flight: int) -> int:
        """Return how many R-workers hold the peak load (equation 9).

        Each R-worker stores the shared prefix once; each second copy stores another prefix of its own.
        """
        shared, copies = self.workload.shared_prefix_len, self.copies - 1
        peak_context = self._peak(in_flight) / in_flight
        held = peak_context - shared + copies * peak_context + self.copies * self.state_tokens
        needed = round_up(equations.memory_r_workers(in_flight, held, self.capacity_tokens - shared))
        return max(needed, self.copies)


def round_up(number: float) -> int:
    """Return ``number`` rounded up, ignoring the last bits of a division."""
    return math.ceil(number - 1e-9 * abs(number))
