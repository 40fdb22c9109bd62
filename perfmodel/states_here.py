"""Time and memory of recurrent states that the S-worker keeps (``--state-on s``)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.stages import PROMPT_ROWS_PER_STATE


@dataclass(frozen=True)
class StatesHere:
    """The cost of recurrent states on the S-worker: the mean layer's seconds per call, and per row in the call.

    ``num_places``: states that the S-worker's memory can hold.
    """

    row_seconds: float
    call_seconds: float = 0.0
    num_places: float = math.inf

    def seconds(self, rows: float, prompt_rows: float) -> float:
        """Return the seconds of the mean layer's call.

        A call advances ``rows`` states by one decode row each, and others by ``prompt_rows`` rows in all. As many as
        PROMPT_ROWS_PER_STATE prompt rows take the time of one decode row.
        """
        return self.call_seconds + self.row_seconds * (rows + prompt_rows / PROMPT_ROWS_PER_STATE)

    def check_places(self, in_flight: int, copies: int, state_bytes: int) -> None:
        """Raise PlanError if memory cannot hold ``copies`` states of each of ``in_flight`` sequences."""
        if in_flight * copies > self.num_places:
            raise PlanError(
                f"the S-worker's memory has room for {self.num_places:.0f} states of {state_bytes / 1e6:.4g} MB, "
                f"and {in_flight} sequences in flight ({copies} of each) have {in_flight * copies}: take a smaller "
                "mini-batch, or --state-on r"
            )

    @staticmethod
    def of_bandwidth(shape: ModelShape, bytes_per_second: float, memory_bytes: float) -> StatesHere:
        """Return the states' costs from the memory's rate. ``memory_bytes``: memory for states."""
        size = shape.state_bytes_per_sequence
        return StatesHere(2.0 * size / shape.num_layers / bytes_per_second, 0.0, max(memory_bytes, 0.0) // size)

    @staticmethod
    def as_measured(shape: ModelShape, state: tuple[float, float], num_places: float = math.inf) -> StatesHere:
        """Return the states' costs from ``state``: seconds of a recurrent layer's call, and of one sequence's state."""
        share = shape.state.num_layers / shape.num_layers if shape.state else 0.0
        return StatesHere(share * state[1], share * state[0], num_places)
