"""An engine's journal: the engine's requests, and the tokens of each committed step before clients get them."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterable, Mapping
from pathlib import Path

from fastdecode.api.request import Request
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.core.held import KnownTokens
from fastdecode.journal.past import Past
from fastdecode.journal.places import FILE
from fastdecode.journal.records import Began, Kept, Run, read
from fastdecode.scheduler.names import NO_NOTES, Notes


def next_run(folder: str | None) -> Run:
    """Return a new ``Run``, which names the previous one, for an engine that will open the journal in ``folder``."""
    before = ""
    # Bytes read from the beginning of the file: enough for the first record
    head_bytes = 4096
    if folder is not None:
        with contextlib.suppress(OSError), (Path(folder) / FILE).open("rb") as file:
            records, _ = read(file.read(head_bytes))
            before = records[0].run if records and isinstance(records[0], Began) else ""
    return Run(secrets.token_hex(16), before)


class Journal:
    """A journal without a file: it knows no earlier requests and writes nothing. Its subclass ``KeptJournal`` writes.
    ``num_bytes``: size of the file. ``write_seconds``: seconds for which steps have waited for writes. ``was_found``:
    whether an earlier run's journal was found. ``before``: that run's name; "" if that run had another model.
    ``records``: whether the journal writes. ``kept``: the data given to ``keep``, by name, oldest first.
    """

    next_sequence_id = 0
    num_bytes, write_seconds = 0, 0.0
    lowest_name = 0
    before = ""
    was_found = False
    records = False

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def past(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Past | None:
        """Return this request's state as an earlier engine recorded it; None if there is none, or on a second call."""
        return None

    def cached_tokens(self, whole_prompts: bool) -> dict[int, KnownTokens]:
        """Return the tokens that R-workers may have cached for the earlier engine, by cache id.

        ``whole_prompts``: see ``Past.cached_tokens``.
        """
        return {}

    def enter(self, request: Request) -> None:
        """Record ``request`` and its replayed tokens."""

    def grew(self, requests: Iterable[Request], notes: Notes = NO_NOTES) -> None:
        """Record a committed step: new tokens and ends of ``requests``; cache ids and cached tokens in ``notes``."""

    def settle(self) -> None:
        """Make the records of ``grew`` survive this process, so that clients may get the tokens."""

    def reached(self, counts: Mapping[int, int]) -> None:
        """Record how many tokens of each of the earlier engine's sequences are correctly cached, by sequence id.
        This engine's own sequences are recorded as they are computed.
        """

    def dropped(self, request: Request) -> None:
        """Record that ``request`` was aborted."""

    def keep(self, name: str, data: bytes) -> None:
        """Keep ``data`` for a later engine under ``name``, replacing older data. The journal does not read ``data``."""

    def forget(self, name: str) -> None:
        """Drop the data kept under ``name``, if any."""

    def close(self) -> None:
        """Close the journal when the engine ends normally."""
