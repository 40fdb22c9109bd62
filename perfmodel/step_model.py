"""The whole of FastDecode as one formula: seconds of a step from its rows and its cached tokens."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.errors import ConfigError
from fastdecode.perfmodel.r_part import RPart
from fastdecode.perfmodel.s_part import SPart
from fastdecode.perfmodel.transport import Transport

NO_TRANSPORT = Transport()


@dataclass(frozen=True)
class Stages:
    """Seconds of one layer and one mini-batch: on the S-worker, on the busiest R-worker, on the slowest hop, and the
    whole way there and back."""

    s_part: float
    r_part: float
    hop: float
    trip: float


@dataclass(frozen=True)
class StepModel:
    """Answers ``StepTime(tokens, kv_tokens)``; sequences are spread evenly over R-workers and mini-batches.

    ::

        k = 2     S-worker  |A1|B1|A2|B2|          one layer of all k mini-batches takes the longest of
                  link         \\A1\\B1\\A2\\            k·S, k·R, k·hop  (a stage is always busy)
                  R-worker      |A1|B1|A2|         S + trip + R     (a mini-batch waits for its own o)

    ``num_r_workers`` may be a fraction while a plan is being weighed.
    """

    num_layers: int
    s_part: SPart
    r_part: RPart
    num_r_workers: float = 1.0
    num_mini_batches: int = 2
    transport: Transport = NO_TRANSPORT
    step_overhead_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.num_layers < 1 or self.num_mini_batches < 1 or not self.num_r_workers > 0:
            raise ConfigError("layers, mini-batches and R-workers must be at least 1")

    def __call__(self, tokens: float, kv_tokens: float) -> float:
        """Seconds of a step that computes ``tokens`` rows and attends over ``kv_tokens``, all mini-batches together."""
        head = self.num_mini_batches * self.s_part.head_seconds(tokens / self.num_mini_batches)
        return self.num_layers * self.layer_seconds(tokens, kv_tokens) + head + self.step_overhead_seconds

    def stages(self, tokens: float, kv_tokens: float) -> Stages:
        """Of one layer and one mini-batch of such a step."""
        rows = tokens / self.num_mini_batches
        return Stages(
            s_part=self.s_part.layer_seconds(rows),
            r_part=self.r_part.seconds(kv_tokens / self.num_mini_batches / self.num_r_workers),
            hop=self.transport.stage_seconds(rows),
            trip=self.transport.trip_seconds(rows),
        )

    def layer_seconds(self, tokens: float, kv_tokens: float) -> float:
        """One layer of all mini-batches."""
        return max(self._bounds(tokens, kv_tokens).values())

    def bottleneck(self, tokens: float, kv_tokens: float) -> str:
        """What the step waits for: "s-worker", "r-workers", "transport" or "round-trip"; the first of equals."""
        bounds = self._bounds(tokens, kv_tokens)
        return max(bounds, key=lambda name: bounds[name])

    def balanced_kv_tokens(self, tokens: float) -> float:
        """The load at which the R-part takes as long as the S-part: ``--kv-load-limit auto``; 0 where it never can."""
        per_worker = self.s_part.layer_seconds(tokens / self.num_mini_batches) - self.r_part.call_seconds
        return max(per_worker, 0.0) / self.r_part.seconds_per_token * self.num_r_workers * self.num_mini_batches

    def _bounds(self, tokens: float, kv_tokens: float) -> dict[str, float]:
        stages, k = self.stages(tokens, kv_tokens), self.num_mini_batches
        round_trip = stages.s_part + stages.trip + stages.r_part
        if not self.transport.overlapped:
            waits = k * stages.trip
            return {
                "s-worker": k * stages.s_part + waits,
                "r-workers": k * stages.r_part + waits,
                "round-trip": round_trip,
            }
        return {
            "s-worker": k * stages.s_part,
            "r-workers": k * stages.r_part,
            "transport": k * stages.hop,
            "round-trip": round_trip,
        }
