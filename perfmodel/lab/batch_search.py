"""Searches a plan's mini-batch size: the one beyond which throughput hardly rises (the knee), within latency limits."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.perfmodel import equations
from fastdecode.perfmodel.equations import MOST_SEQUENCES, largest
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.service import ServiceLimits


@dataclass(frozen=True)
class BatchSearch:
    """Finds mini-batch sizes for a planner, whose R-workers are given, or as many as keep up with the S-worker."""

    planner: Planner

    def knee(self) -> int:
        """Return the smallest batch for which doubling raises E(B) = B/T(B) by less than a tenth (eq. 8).

        T(B) is the S-part's time. If the number of R-workers is given, E(B) is the tokens per second of S-worker, link
        and R-workers together, and the batch must also fit the R-workers' memory.
        """
        # Only multiples of this batch size are tried, since GPUs multiply in tiles
        knee_tile = 64
        sizes = range(knee_tile, MOST_SEQUENCES // 2, knee_tile)
        # The batch is large enough when doubling it raises throughput by less than this fraction
        knee_gain = 0.1
        knee = next((size for size in sizes if self._gain_of_doubling(size) < knee_gain), sizes[-1])
        return max(1, largest(self._fits_pool, knee))

    def within(self, limits: ServiceLimits) -> int | None:
        """Return the largest batch up to the knee that meets ``limits``; None if none does.

        Throughput rises up to the knee, so this is the best batch within the limits.
        """
        least = self.smallest()
        if not self._keeps(least, limits):
            return None
        return max(least, largest(lambda size: size <= least or self._keeps(size, limits), self.knee()))

    def smallest(self) -> int:
        """Return the smallest mini-batch with which enough R-workers would be as fast as the S-worker."""
        if self.planner.num_r_workers:
            return 1
        return largest(lambda size: not self._can_be_balanced(size), MOST_SEQUENCES - 1) + 1

    def largest_mini_batch(self, latency_limit_seconds: float) -> int:
        """Return the largest batch whose mean sequence takes at most ``latency_limit_seconds`` to decode.

        This is equation 7, with the seconds of all stages of a step.
        """
        if not latency_limit_seconds > 0:
            raise ConfigError(f"latency_limit must be above 0 seconds, not {latency_limit_seconds:g}")
        output_len, smallest = self.planner.workload.output_len, self.smallest()
        least = output_len * self.step_seconds(smallest)
        if least > latency_limit_seconds:
            raise PlanError(
                f"a latency limit of {latency_limit_seconds:g} s cannot be met: with a mini-batch of {smallest}, "
                f"{output_len:g} steps of {least / output_len:.3g} s take {least:.3g} s, "
                f"{least - latency_limit_seconds:.3g} s too long"
            )
        most = max(1, largest(self._fits_pool, MOST_SEQUENCES))
        return largest(
            lambda size: size < smallest or output_len * self.step_seconds(size) <= latency_limit_seconds, most
        )

    def step_seconds(self, mini_batch_size: int) -> float:
        """Return the seconds of the mean step with the given R-workers, or with as many (a fraction) as keep up."""
        planner = self.planner
        in_flight = equations.in_flight(mini_batch_size, planner.num_mini_batches)
        return planner.mean_step_seconds(in_flight, self._workers(mini_batch_size))

    def _workers(self, mini_batch_size: int) -> float:
        return self.planner.num_r_workers or max(self.planner.enough_r_workers(mini_batch_size), 1.0)

    def _keeps(self, mini_batch_size: int, limits: ServiceLimits) -> bool:
        if not self._fits_pool(mini_batch_size):
            return False
        in_flight = equations.in_flight(mini_batch_size, self.planner.num_mini_batches)
        first = self.planner.first_token_seconds(in_flight, self._workers(mini_batch_size))
        return limits.kept_by(self.step_seconds(mini_batch_size), first)

    def _fits_pool(self, mini_batch_size: int) -> bool:
        planner = self.planner
        in_flight = equations.in_flight(mini_batch_size, planner.num_mini_batches)
        if not planner.has_places(in_flight):
            return False
        return planner.num_r_workers is None or planner.memory_r_workers(in_flight) <= planner.num_r_workers

    def _can_be_balanced(self, mini_batch_size: int) -> bool:
        """Return whether the R-part's costs that more R-workers do not reduce take less time than the S-worker."""
        planner = self.planner
        indivisible = equations.indivisible_seconds(
            planner.r_part.seconds_per_token, planner.workload.shared_prefix_len, planner.r_part.call_seconds
        )
        return indivisible < planner.other_stages(mini_batch_size)

    def _gain_of_doubling(self, mini_batch_size: int) -> float:
        planner = self.planner
        if planner.num_r_workers:
            sizes = (mini_batch_size, 2 * mini_batch_size)
            once, twice = (planner.candidate(size, planner.num_r_workers) for size in sizes)
            return twice.output_tokens_per_second / once.output_tokens_per_second - 1.0
        rows = mini_batch_size * planner.workload.rows_per_output_token
        return 2.0 * planner.s_seconds(rows) / planner.s_seconds(2 * rows) - 1.0
