"""Findings of ``fastdecode doctor`` about a journal: its content, its owner, and whether it is writable."""

from __future__ import annotations

import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from fastdecode.cli.findings import Finding
from fastdecode.journal.inspect import JournalLook, look_at
from fastdecode.journal.pulse import SILENT_SECONDS


def check_journal(folder: str) -> Iterator[Finding]:
    """Yield findings about the journal in ``folder``. The only change is a probe file, which is removed again."""
    if not Path(folder).is_dir():
        yield Finding("broken", f"journal {folder}: no folder", "start an engine with --journal, which makes it")
        return
    look = look_at(folder)
    if look is None:
        yield Finding("note", f"journal {folder}: empty", "no engine with --journal has used this folder yet")
    else:
        yield from _contents(folder, look)
    yield _writing(Path(folder))


def _contents(folder: str, look: JournalLook) -> Iterator[Finding]:
    counts = f"{look.num_requests} requests, of which {look.num_ended} have ended; {look.num_bytes / 2**20:.1f} MiB"
    yield Finding("ok", f"journal {folder}: {counts}")
    if lost := look.num_bytes - look.num_whole:
        cure = (
            "the next engine cuts it there, and computes its tokens again; if an engine is writing it now, this is "
            "no fault"
        )
        yield Finding("note", f"journal: {lost} bytes at its end are no whole records", cure)
    if look.pulse_seconds is not None:
        is_alive = look.pulse_seconds < SILENT_SECONDS
        who = "a session's server has it now" if is_alive else "no session's server has it now"
        yield Finding("ok", f"journal: {who}: last sign of life {look.pulse_seconds:.1f} s ago")


def _writing(folder: Path) -> Finding:
    """Return a finding: can files in ``folder`` be locked and renamed, as engines need?"""
    path = folder / f"doctor-{secrets.token_hex(4)}"
    try:
        with path.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(path, path.with_suffix(".renamed"))  # noqa: PTH105 (of two names, not of a Path)
        path.with_suffix(".renamed").unlink()
    except OSError as error:
        path.unlink(missing_ok=True)
        cure = "a file system with locks that this user may write; for a standby one that both hosts mount"
        return Finding("broken", f"journal {folder}: {error.strerror}", cure)
    return Finding("ok", f"journal {folder}: can be written, locked and renamed in")
