"""Checks output files before the work begins, writes JSON, and makes progress bars."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.core.errors import ConfigError, naming

if TYPE_CHECKING:  # hosts of R-workers need not have matplotlib
    from tqdm import tqdm


def check_output_files(*paths: str | None, plots: Iterable[str | None] = ()) -> None:
    """Raise ConfigError if an output path cannot be written, before anything is measured. None paths are skipped.

    Raises:
        ConfigError: a path is a folder, is in no folder, may not be written, or is a plot of an unknown format or
            one that cannot be drawn since matplotlib is not installed.
    """
    pictures = list(filter(None, plots))
    for path in (*filter(None, paths), *pictures):
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a folder; name a file to write, such as {Path(path) / 'out'}")
        folder = Path(path).resolve().parent
        if not folder.is_dir():
            raise ConfigError(f"{path}: there is no such folder to write it in")
        if not os.access(path if Path(path).exists() else folder, os.W_OK):
            raise ConfigError(f"{path}: this user may not write it")
    if pictures and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError(f"{pictures[0]}: plots need matplotlib: pip install 'fastdecode[plot]'")
    plot_suffixes = (".png", ".pdf", ".svg")
    for path in pictures:
        if Path(path).suffix.lower() not in plot_suffixes:
            raise ConfigError(f"{path}: a plot must end in {', '.join(plot_suffixes[:-1])} or {plot_suffixes[-1]}")


def write_json(figures: Any, path: str | None) -> None:
    """Write ``figures`` to the file ``path`` as JSON; do nothing if ``path`` is None. Raise OSError on failure."""
    if path:
        with naming(path):
            Path(path).write_text(json.dumps(figures, indent=2, allow_nan=False) + "\n", encoding="utf-8")


def progress_bar(total: int | None, unit: str, **options: Any) -> tqdm:
    """Return a progress bar on stderr that counts ``total`` of ``unit``; disabled if stderr is no terminal."""
    from tqdm import tqdm

    return tqdm(total=total, unit=unit, **{"disable": None if sys.stderr.isatty() else True, **options})
