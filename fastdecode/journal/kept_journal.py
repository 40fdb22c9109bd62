"""A journal that outlives the process which writes it."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import msgspec

from fastdecode.api.request import Completion, Request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import BackendError, CapacityError, ConfigError, FastDecodeError
from fastdecode.core.held import KnownTokens, Reached
from fastdecode.journal.journal import Journal
from fastdecode.journal.past import Past, asked, pasts_of
from fastdecode.journal.places import Place
from fastdecode.journal.records import (
    Began,
    Chain,
    Dropped,
    Forgot,
    Kept,
    Placed,
    Record,
    Stepped,
    TokenLogprobs,
    kept_in,
    read,
)
from fastdecode.scheduler.names import NO_NOTES, Notes

logger = logging.getLogger(__name__)


class KeptJournal(Journal):
    """A journal in a ``Place`` that outlives this process. It records each step before clients get the step's tokens.
    ``next_sequence_id``: greater than every recorded sequence id. ``lowest_name``: the lowest recorded cache id, or 0.
    """

    records = True

    def __init__(self, place: Place, fingerprint: str, run: str, epoch: int = 0) -> None:
        """Read the journal in ``place``; ``close`` closes the place too.
        ``fingerprint``: hash of the model, dtype and seed; a journal with another fingerprint is replaced. ``run``: the
        name of this engine's run. ``epoch``: not below the epoch of any lease under which an earlier engine has
        written, so that this journal counts as newer.

        Raises:
          ConfigError: the place cannot be read or written.
        """
        super().__init__()
        self._place = place
        self._began = Began(fingerprint, run, epoch)
        self._written: dict[int, int] = {}
        self._was_asked = False
        self._is_kept = True
        try:
            found = self._found()
            self.next_sequence_id = max((past.end_id for past in found), default=0)
            names = (name for past in found for sample in past.samples for name in sample.names)
            self.lowest_name = min(names, default=0)
            self._write_anew(found)
        except OSError as error:
            raise ConfigError(f"journal: {error.filename or place.name}: {error.strerror}") from None
        self._known = {past.asked.request_id: past for past in found}
        if found:
            name = place.name
            logger.warning("journal: %s has %d requests, which continue when clients send them again", name, len(found))

    def past(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Past | None:
        found = self._known.get(request_id)
        if found is None:
            return None
        if not found.is_of(prompt_token_ids, params):
            logger.warning(
                "journal: request %s differs from the recorded one: it starts from the beginning", request_id
            )
            return None
        return self._known.pop(request_id)

    def cached_tokens(self, whole_prompts: bool) -> dict[int, KnownTokens]:
        found = (past.cached_tokens(whole_prompts) for past in self._known.values())
        return {name: tokens for each in found for name, tokens in each.items()}

    def enter(self, request: Request) -> None:
        self._was_asked = True
        first = request.completions[0].sequence.sequence_id
        if first >= self.next_sequence_id:
            replaced = self._known.pop(request.request_id, None)
            self._write([*([Dropped(replaced.asked.sequence_id)] if replaced else []), asked(request)])
        for each in request.completions:
            if each.finish_reason is None:
                self._written[each.sequence.sequence_id] = len(each.sequence.output_token_ids)

    def grew(self, requests: Iterable[Request], notes: Notes = NO_NOTES) -> None:
        step = Stepped([], [], [])
        for request in requests:
            for completion in request.completions:
                self._add(completion, step)
        records: list[Record] = [step] if step.tokens or step.ended else []
        if records := [*records, *_placed(notes)]:
            self._write(records, settles=False)

    def settle(self) -> None:
        self._try(self._place.settle)

    def reached(self, counts: Mapping[int, int]) -> None:
        if counts:
            self._write([Placed([], [Reached(*each) for each in counts.items()])])

    def dropped(self, request: Request) -> None:
        for each in request.completions:
            self._written.pop(each.sequence.sequence_id, None)
        self._write([Dropped(request.completions[0].sequence.sequence_id)])

    def keep(self, name: str, data: bytes) -> None:
        self.kept.pop(name, None)
        self.kept[name] = kept = Kept(name, time.time(), data)
        self._write([kept])

    def forget(self, name: str) -> None:
        if self.kept.pop(name, None):
            self._write([Forgot(name)])

    def close(self) -> None:
        """Close the journal. If no request remains for a later engine, empty it first."""
        with contextlib.suppress(OSError, FastDecodeError):
            is_over = not (self._written or self.kept) and (self._was_asked or not self._known)
            if self._is_kept and is_over and self._place.is_own:
                self._place.end(Chain().encode([self._began]))
        self._is_kept = False
        self._place.close()

    def _add(self, completion: Completion, step: Stepped) -> None:
        """Add the unrecorded tokens, and the end, of ``completion`` to ``step``."""
        sequence_id, token_ids = completion.sequence.sequence_id, completion.sequence.output_token_ids
        before = self._written.get(sequence_id)
        if before is None:
            return
        if new := token_ids[before:]:
            step.tokens.append((sequence_id, new))
            if completion.logprobs:
                step.logprobs.append((sequence_id, _plain(completion, before)))
        self._written[sequence_id] = len(token_ids)
        if completion.finish_reason is not None:
            step.ended.append((sequence_id, completion.finish_reason, completion.stop_reason))
            del self._written[sequence_id]

    def _write(self, records: list[Record], settles: bool = True) -> None:
        """Append ``records`` in one write; with ``settles``, make them durable."""
        self._try(self._append, records)
        if settles:
            self.settle()

    def _append(self, records: list[Record]) -> None:
        self._place.append(self._chain.encode(records))
        if self._chain.num_bytes > self._limit and self._place.is_own:
            self._write_anew(_without_oldest(_pasts(read(self._place.written())[0])))

    def _try(self, act: Callable[..., None], *values: Any) -> None:
        """Call ``act`` with ``values``. If the call fails, the engine continues without a journal."""
        if not self._is_kept:
            return
        start = time.perf_counter()
        try:
            act(*values)
        except (OSError, BackendError, CapacityError) as error:
            self._is_kept = False
            reason = error.strerror if isinstance(error, OSError) else error
            logger.error("journal: %s: %s: the engine continues without a journal", self._place.name, reason)
        self.num_bytes, self.write_seconds = self._chain.num_bytes, self.write_seconds + time.perf_counter() - start

    def _found(self) -> list[Past]:
        """Return the recorded requests, oldest first; none if the fingerprint differs. Set ``before`` to that run."""
        records = self._newest()
        if not records:
            return []
        self.was_found, self.kept = True, kept_in(records)
        began = records[0]
        if not (isinstance(began, Began) and began.fingerprint == self._began.fingerprint):
            logger.warning(
                "journal: %s belongs to another model, dtype or seed: a new one replaces it", self._place.name
            )
            return []
        self.before = began.run
        self._began = msgspec.structs.replace(self._began, epoch=max(self._began.epoch, began.epoch + 1))
        return _pasts(records)

    def _newest(self) -> list[Record]:
        """Return the records of the journal copy that was written last."""
        found = [read(data) for data in self._place.copies()]
        return max(found, key=_age, default=([], Chain()))[0]

    def _write_anew(self, pasts: list[Past]) -> None:
        """Rewrite the journal with ``pasts`` and kept data. Drop ended requests if the journal gets too large."""
        self._began = msgspec.structs.replace(self._began, edition=self._began.edition + 1)
        growth, most = self._place.growth_bytes, self._place.most_bytes
        data = self._encoded_anew(pasts)
        if len(data) > most / 2:
            data = self._encoded_anew(past for past in pasts if not past.ended)
        self._place.replace(data)
        self._limit = min(2 * len(data) + growth, max(most - growth / 4, len(data) + growth / 4))

    def _encoded_anew(self, pasts: Iterable[Past]) -> bytes:
        """Return the bytes of a complete journal with ``pasts``, and start its checksum chain."""
        self._chain = Chain()
        return self._chain.encode(
            [self._began, *self.kept.values(), *(record for past in pasts for record in past.records())]
        )


def _age(found: tuple[list[Record], Chain]) -> tuple[int, int, int]:
    """Return a sort key for a journal copy; a copy that was written later has a larger key."""
    records, chain = found
    began = records[0] if records else None
    return (began.epoch, began.edition, chain.num_bytes) if isinstance(began, Began) else (-1, 0, 0)


def _pasts(records: list[Record]) -> list[Past]:
    """Return the requests in ``records``, oldest first."""
    return sorted(pasts_of(records).values(), key=lambda past: past.asked.sequence_id)


def _placed(notes: Notes) -> list[Record]:
    """Return ``notes`` as a list with one ``Placed`` record; an empty list if the notes are empty."""
    return [Placed(*notes)] if notes.named or notes.reached else []


def _plain(completion: Completion, start: int) -> TokenLogprobs:
    """Return the log-probabilities and ranks of output tokens from index ``start`` on, without token texts."""
    return [{token: (each.logprob, each.rank) for token, each in row.items()} for row in completion.logprobs[start:]]


def _without_oldest(pasts: list[Past]) -> list[Past]:
    """Return ``pasts`` without the oldest ended requests; those kept have at most ``kept_tokens`` tokens together."""
    kept: list[Past] = []
    num_tokens = 0
    # Ended requests are kept up to this many tokens, since a client may ask for such a request again
    kept_tokens = 1 << 20
    for past in reversed(pasts):
        num_tokens += past.num_tokens if past.ended else 0
        if not past.ended or num_tokens <= kept_tokens:
            kept.append(past)
    return kept[::-1]
