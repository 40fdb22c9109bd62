"""The journal of an engine: its requests, and the tokens of each committed step before they are handed out."""

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

HEAD_BYTES = 4096
"""At the beginning of a file: more than its first record takes."""


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

    ``num_bytes``: of the file; ``write_seconds``: in which steps have waited for it. ``before``: the name of the
    run that wrote what was found, "" where nothing of this model was; ``was_found``: whether anything was. ``kept``:
    what ``keep`` was given, by name, the oldest first.
    """

    next_sequence_id = 0
    num_bytes, write_seconds = 0, 0.0
    lowest_name = 0
    before = ""
    was_found = False

    def __init__(self) -> None:
        self.kept: dict[str, Kept] = {}

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

    def settle(self) -> None:
        """What ``grew`` was told is there, whatever becomes of this process: it may be handed out."""

    def reached(self, counts: Mapping[int, int]) -> None:
        """So many tokens of sequences of the engine before this one are cached, and right: what this one computes is
        said as it does."""

    def dropped(self, request: Request) -> None:
        """``request`` was aborted."""

    def keep(self, name: str, data: bytes) -> None:
        """Have ``data`` outlive this engine under ``name``, in place of what is there; it means nothing here."""

    def forget(self, name: str) -> None:
        """What was kept under ``name`` is not wanted any more; no effect where nothing was."""

    def close(self) -> None:
        """The engine ends by itself."""
