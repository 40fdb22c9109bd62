"""Folders made by this process, which it removes again if they stay empty."""

from __future__ import annotations

import contextlib
from pathlib import Path

_made: set[Path] = set()


def make_folder(folder: Path, mode: int = 0o777) -> None:
    """Make ``folder`` and its missing parents. Raise OSError if that is impossible."""
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=mode, parents=True, exist_ok=True)
    _made.update(missing)


def made_here(folder: Path) -> bool:
    """Return whether this process made ``folder``."""
    return folder in _made


def leave_folder(folder: Path, *files: str) -> None:
    """Remove ``folder`` and its parents, as far as this process made them and they hold nothing but ``files``.

    The caller must keep other processes from writing to ``folder`` during the call.
    """
    with contextlib.suppress(OSError):
        if not made_here(folder) or {each.name for each in folder.iterdir()} - set(files):
            return
        for name in files:
            (folder / name).unlink(missing_ok=True)
        for each in (folder, *folder.parents):
            if not made_here(each):
                return
            each.rmdir()
            _made.discard(each)
