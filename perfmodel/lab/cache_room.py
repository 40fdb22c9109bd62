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
    one sequence's states. ``copies``: per sequence. ``interval_steps``: between micro-batches; None to choose it.
    """

    workload: Workload
    capacity_tokens: float
    state_tokens: float
    copies: int
    interval_steps: int | None

    def interval(self, in_flight: int) -> int:
        """Return the steps from one micro-batch to the next."""
        return self.interval_steps or equations.default_interval_steps(in_flight, self.workload.output_len)

    def micro_batch(self, in_flight: int) -> int:
        """Return the sequences that start together, a whole number."""
        return max(1, round(equations.micro_batch_size(in_flight, self.workload.output_len, self.interval(in_flight))))

    def load_limit(self, in_flight: int, num_r_workers: int) -> int:
        """Return the limit of the KV load: the schedule's peak.

        Where sequences have prompts, a 32nd more counts, since a prompt is computed while it holds its seat, and as
        many on each R-worker as on the fullest one, which has its own part of the limit, and whose sequences are older
        than the mean. Less keeps seats empty.
        """
        if not self.workload.prompt_len:
            return self._peak(in_flight)
        uneven = num_r_workers * math.ceil(in_flight / num_r_workers) - in_flight
        peak = self._peak(in_flight, max(1, round(in_flight / 32), uneven))
        each = (in_flight + uneven) / num_r_workers
        return round_up(peak * barrier(num_r_workers, each, self.workload.context_spread))

    def _peak(self, in_flight: int, waiting: int = 0) -> int:
        """Return the schedule's peak with ``waiting`` sequences beside those in flight.

        The peak is never below one whole sequence, which could otherwise never run.
        """
        output_len = self.workload.output_len
        before = self.workload.mean_context - output_len / 2.0  # the prompt, and what unequal lengths add
        interval = self.interval(in_flight)
        peak = equations.peak_load_stabilized(in_flight + waiting, output_len, interval, before)
        return round_up(max(peak, self.workload.seq_len))

    def memory_r_workers(self, in_flight: int) -> int:
        """Return the R-workers that hold the peak (equation 9), each with its own shared prefix.

        Second copies store their own rows, also those of a shared prefix.
        """
        shared, copies = self.workload.shared_prefix_len, self.copies - 1
        peak_context = self._peak(in_flight) / in_flight
        held = peak_context - shared + copies * peak_context + self.copies * self.state_tokens
        needed = round_up(equations.memory_r_workers(in_flight, held, self.capacity_tokens - shared))
        return max(needed, self.copies)


def round_up(number: float) -> int:
    """Return ``number`` rounded up, ignoring the last bits of a division."""
    return math.ceil(number - 1e-9 * abs(number))
