"""The journal of an engine: its requests, and the tokens of each committed step before they are handed out."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import secrets
import time
from collections.abc import Iterable
from pathlib import Path

from fastdecode.api.request import Completion, Request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.errors import ConfigError, naming
from fastdecode.core.held import KnownTokens
from fastdecode.journal.past import Past, asked, pasts_of
from fastdecode.journal.records import Began, Chain, Dropped, Placed, Record, Run, Stepped, TokenLogprobs, read
from fastdecode.scheduler.store.names import NO_NOTES, Notes

KEPT_TOKENS = 1 << 20
"""Tokens of ended requests that are kept when a journal is written anew, the newest first: so many may be asked for
once more."""

HEAD_BYTES = 4096
"""At the beginning of a file: more than its first record takes."""

GROWTH_BYTES = 1 << 26
"""A journal is written anew, without what ended long ago, when it has grown by so much and to twice its size."""

FILE = "journal"

logger = logging.getLogger(__name__)


def next_run(folder: str | None) -> Run:
    """That of the engine which is about to open the journal in ``folder``."""
    before = ""
    if folder is not None:
        with contextlib.suppress(OSError), (Path(folder) / FILE).open("rb") as file:
            records, _ = read(file.read(HEAD_BYTES))
            before = records[0].run if records and isinstance(records[0], Began) else ""
    return Run(secrets.token_hex(16), before)


class Journal:
    """Of an engine that keeps none: nothing is known, and nothing is written.

    ``num_bytes``: of the file; ``write_seconds``: in which steps have waited for it.
    """

    next_sequence_id = 0
    num_bytes, write_seconds = 0, 0.0
    lowest_name = 0

    def past(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Past | None:
        """What an engine before this one has made of the same request; known once."""
        return None

    def cached_tokens(self, whole_prompts: bool) -> dict[int, KnownTokens]:
        """By the names that R-workers know them by the tokens that these may have cached, of the engine before this
        one. ``whole_prompts``: see ``Past.cached_tokens``."""
        return {}

    def enter(self, request: Request) -> None:
        """``request`` is under way, with what was replayed of it."""

    def grew(self, requests: Iterable[Request], notes: Notes = NO_NOTES) -> None:
        """A step was committed, and these requests have got tokens, or an end; what lies where is in ``notes``."""

    def dropped(self, request: Request) -> None:
        """``request`` was aborted."""

    def close(self) -> None:
        """The engine ends by itself."""


class FileJournal(Journal):
    """A journal in a folder, which one process at a time may write.

    What is written survives the end of this process, however that comes: each step is one write to the system before
    its tokens are handed out. It is not forced to the disk, so a machine that loses its power may lose some last steps,
    and their tokens are then computed again. ``next_sequence_id``: above all ids in it; ``lowest_name``: of all that
    its sequences have on R-workers, or 0.
    """

    def __init__(self, folder: str, fingerprint: str, run: str, takes_over: bool = False) -> None:
        """Read what is in ``folder``, which is made where there is none.

        ``fingerprint``: of all that tokens depend on beside their requests; what is of another is not used.
        ``run``: see ``Run``.
        ``takes_over``: the process that writes it, if there is one, has lost its R-workers to this one.

        Raises:
            ConfigError: no folder, not to be written, or another process writes it.
        """
        self._path = Path(folder) / FILE
        self._began = Began(fingerprint, run)
        self._written: dict[int, int] = {}
        self._was_asked = False
        try:
            with naming(folder):
                Path(folder).mkdir(parents=True, exist_ok=True)
                self._lock = _locked(Path(folder) / "lock", takes_over)
                found = self._read()
                self.next_sequence_id = max((past.end_id for past in found), default=0)
                names = (name for past in found for sample in past.samples for name in sample.names)
                self.lowest_name = min(names, default=0)
                self._fd = self._write_anew(found)
        except OSError as error:
            raise ConfigError(f"journal: {error.filename}: {error.strerror}") from None
        self._known = {past.asked.request_id: past for past in found}
        if found:
            logger.warning("journal: %s has %d requests, which go on when they are asked again", folder, len(found))

    def past(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Past | None:
        found = self._known.get(request_id)
        if found is None:
            return None
        if not found.is_of(prompt_token_ids, params):
            logger.warning("journal: request %s asks something else than it did: it begins anew", request_id)
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
            self._write(records)

    def dropped(self, request: Request) -> None:
        for each in request.completions:
            self._written.pop(each.sequence.sequence_id, None)
        self._write([Dropped(request.completions[0].sequence.sequence_id)])

    def close(self) -> None:
        """Where something was asked, and all of it has ended, nothing is left to go on with: the journal is empty."""
        if self._fd < 0:
            return
        with contextlib.suppress(OSError):
            if self._was_asked and not self._written and self._is_own:
                os.close(self._fd)
                self._fd = self._write_anew([])
        os.close(self._fd)
        os.close(self._lock)
        self._fd = -1

    @property
    def _is_own(self) -> bool:
        """False once another process has taken the journal over."""
        return os.path.samestat(os.fstat(self._fd), os.stat(self._path))  # noqa: PTH116 (as fstat gives it)

    def _add(self, completion: Completion, step: Stepped) -> None:
        """Enter in ``step`` what ``completion`` has got since it was last asked."""
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

    def _write(self, records: list[Record]) -> None:
        """Append ``records`` in one write. Where that fails the engine goes on, and keeps no journal from here on."""
        if self._fd < 0:
            return
        start = time.perf_counter()
        try:
            data = self._chain.encode(records)
            if (written := os.write(self._fd, data)) < len(data):
                raise OSError(0, f"{written} of {len(data)} bytes were written")
            if self._chain.num_bytes > self._limit and self._is_own:
                os.close(self._fd)
                self._fd = self._write_anew(_without_oldest(self._read()))
        except OSError as error:
            self._fd = -1
            logger.error("journal: %s: %s: the engine goes on without it", self._path, error.strerror)
        self.num_bytes, self.write_seconds = self._chain.num_bytes, self.write_seconds + time.perf_counter() - start

    def _read(self) -> list[Past]:
        """The requests in the file, by age; of another fingerprint none."""
        if not self._path.exists():
            return []
        records, _ = read(self._path.read_bytes())
        if records and not (isinstance(records[0], Began) and records[0].fingerprint == self._began.fingerprint):
            logger.warning("journal: %s is of another model, dtype or seed: it begins anew", self._path)
            return []
        return sorted(pasts_of(records).values(), key=lambda past: past.asked.sequence_id)

    def _write_anew(self, pasts: list[Past]) -> int:
        """Have the file hold ``pasts`` alone; returns what it is open as."""
        self._chain = Chain()
        records = [self._began, *(record for past in pasts for record in past.records())]
        aside = self._path.with_suffix(".new")
        with naming(str(aside)), aside.open("wb") as file:
            file.write(self._chain.encode(records))
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, self._path)  # noqa: PTH105 (of two names, not of a Path)
        self._limit = 2 * self._chain.num_bytes + GROWTH_BYTES
        return os.open(self._path, os.O_WRONLY | os.O_APPEND)


def _placed(notes: Notes) -> list[Record]:
    """The record of ``notes``, if there is something in them."""
    return [Placed(*notes)] if notes.named or notes.reached else []


def _locked(path: Path, takes_over: bool) -> int:
    """``path``, open and locked for as long as this process lives; ConfigError names the one that has it, unless this
    one ``takes_over``."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.read(fd, 20).decode(errors="replace")
        os.close(fd)
        if takes_over:
            logger.warning("journal: %s was written by process %s, which is taken over", path.parent, owner)
            path.unlink()
            return _locked(path, takes_over=False)
        raise ConfigError(f"journal: {path.parent} is written by process {owner}: give each engine its own") from None
    os.truncate(fd, 0)
    os.pwrite(fd, str(os.getpid()).encode(), 0)
    return fd


def _plain(completion: Completion, start: int) -> TokenLogprobs:
    """Log-probabilities of the tokens from ``start`` on, less their texts."""
    return [{token: (each.logprob, each.rank) for token, each in row.items()} for row in completion.logprobs[start:]]


def _without_oldest(pasts: list[Past]) -> list[Past]:
    """``pasts``, by age, less those that have ended and are followed by ``KEPT_TOKENS`` tokens of others that have."""
    kept: list[Past] = []
    num_tokens = 0
    for past in reversed(pasts):
        num_tokens += past.num_tokens if past.ended else 0
        if not past.ended or num_tokens <= KEPT_TOKENS:
            kept.append(past)
    return kept[::-1]
