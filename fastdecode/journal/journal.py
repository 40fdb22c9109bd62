"""An engine's journal: its requests, and the tokens of each committed step before they are sent."""

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
    """Return the run of the engine that will open the journal in ``folder``."""
    before = ""
    # At the beginning of a file: more than its first record takes
    head_bytes = 4096
    if folder is not None:
        with contextlib.suppress(OSError), (Path(folder) / FILE).open("rb") as file:
            records, _ = read(file.read(head_bytes))
            before = records[0].run if records and isinstance(records[0], Began) else ""
    return Run(secrets.token_hex(16), before)


class Journal:
    """The journal of an engine without one: nothing is known, and nothing is written.

    ``num_bytes``: of the file. ``write_seconds``: seconds that steps have waited for it. ``before``: the name of the
    run that wrote what was found; "" if nothing of this model was. ``was_found``: whether anything was. ``kept``: what
    ``keep`` was given, by name, oldest first.
    """

    next_sequence_id = 0
    num_bytes, write_seconds = 0, 0.0
    lowest_name = 0
    before = ""
    was_found = False

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

    def past(self, request_id: str, prompt_token_ids: list[int], params: SamplingParams) -> Past | None:
        """Return what an earlier engine has produced for the same request, once; None if nothing."""
        return None

    def cached_tokens(self, whole_prompts: bool) -> dict[int, KnownTokens]:
        """Return the tokens that R-workers may have cached for the earlier engine, by cache id.

        ``whole_prompts``: see ``Past.cached_tokens``.
        """
        return {}

    def enter(self, request: Request) -> None:
        """Record ``request``, with what was replayed of it."""

    def grew(self, requests: Iterable[Request], notes: Notes = NO_NOTES) -> None:
        """Record a committed step: the new tokens or ends of ``requests``, and in ``notes`` where their caches are."""

    def settle(self) -> None:
        """Make the records of ``grew`` survive this process, so that the tokens may be sent."""

    def reached(self, counts: Mapping[int, int]) -> None:
        """Record how many tokens of the earlier engine's sequences are cached and right.

        Those of this engine are recorded as they are computed.
        """

    def dropped(self, request: Request) -> None:
        """Record that ``request`` was aborted."""

    def keep(self, name: str, data: bytes) -> None:
        """Keep ``data`` for a later engine under ``name``, replacing older data. The engine does not interpret it."""

    def forget(self, name: str) -> None:
        """Drop the data kept under ``name``, if any."""

    def close(self) -> None:
        """Close the journal at an orderly end."""
