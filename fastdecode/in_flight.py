"""The requests that an engine has under way, and which sequence grows which of their completions."""

from __future__ import annotations

from fastdecode.request import Completion, Request
from fastdecode.sworker.sampling import SamplingRow


class InFlight:
    """Requests by id, and by the sequences that still grow."""

    def __init__(self) -> None:
        self._requests: dict[str, Request] = {}
        self._growing: dict[int, tuple[Request, Completion]] = {}

    def __len__(self) -> int:
        """Requests waiting or running."""
        return len(self._requests)

    def __contains__(self, request_id: str) -> bool:
        """True when ``request_id`` waits or runs."""
        return request_id in self._requests

    def add(self, request: Request) -> None:
        """``request`` is under way."""
        self._requests[request.request_id] = request
        for completion in request.completions:
            self._growing[completion.sequence.sequence_id] = (request, completion)

    def remove(self, request_id: str) -> Request | None:
        """Forget a request; None when it is not here."""
        return self._requests.pop(request_id, None)

    def end(self, completion: Completion) -> None:
        """``completion`` grows no more."""
        del self._growing[completion.sequence.sequence_id]

    def family(self, sequence_id: int) -> tuple[Request, list[Completion]]:
        """Whom a sequence's next token is for: its completion, and while several share its prompt all of them."""
        request, completion = self._growing[sequence_id]
        siblings = [self._growing[sibling.sequence_id][1] for sibling in completion.sequence.siblings]
        return request, [completion, *siblings]

    def sampling_rows(self, sequence_id: int) -> list[SamplingRow]:
        """What the sampler needs for the next token of everybody whom it is for."""
        request, completions = self.family(sequence_id)
        return [request.sampling_row(completion) for completion in completions]
