"""How many recurrent states fit the S-worker's memory, if the S-worker keeps them."""

from __future__ import annotations

from dataclasses import dataclass

from fastdecode.core.errors import CapacityError

COUNTED_BLOCKS = 1
"""R-worker blocks that the scheduler counts for a state, although the state is on the S-worker."""


@dataclass(frozen=True)
class StateRoom:
    """Memory on the S-worker for ``num_states`` recurrent states of ``state_bytes`` bytes each.
    ``in_flight``: most states of waiting and running sequences; the others may be kept for prefixes. A sequence has one
    more state while it moves between R-workers.
    """

    num_states: int
    state_bytes: int
    in_flight: int

    @classmethod
    def of(cls, memory_bytes: int, state_bytes: int, max_num_seqs: int, each: int) -> StateRoom:
        """Divide ``memory_bytes`` into states. Raise CapacityError if ``max_num_seqs`` sequences need more memory.
        ``each``: most states of one sequence, for its ranges and their second copies.
        """
        num_states, in_flight = memory_bytes // state_bytes, max_num_seqs * each
        if num_states < in_flight:
            most = f"at most --max-num-seqs {num_states // each}, " if num_states >= each else ""
            raise CapacityError(
                f"state_on: the states of max_num_seqs {max_num_seqs} sequences{f', {each} each,' if each > 1 else ''} "
                f"take {in_flight * state_bytes / 2**30:.3g} GiB, {state_bytes:,} bytes each, and the S-worker may "
                f"have {memory_bytes / 2**30:.3g} GiB for them: give {most}at least --state-memory "
                f"{-(-in_flight * state_bytes // 2**20)}MiB, or --state-on r, with which R-workers keep them"
            )
        return cls(num_states, state_bytes, in_flight)

    @property
    def kept(self) -> int:
        """Most states that may be kept for prefixes, over all R-workers."""
        return self.num_states - self.in_flight
