"""Where a command is to write: looked at before it measures, so that nothing is lost at the end."""

from __future__ import annotations

from pathlib import Path

from fastdecode.errors import ConfigError


def check_output_files(*paths: str | None) -> None:
    """ConfigError names the first that cannot be a file to write: its folder is missing, or it is a folder itself.

    None stands for a file that nobody asked for.
    """
    for path in filter(None, paths):
        if Path(path).is_dir():
            raise ConfigError(f"{path}: is a folder; name a file to write, such as {Path(path) / 'out'}")
        if not Path(path).resolve().parent.is_dir():
            raise ConfigError(f"{path}: there is no such folder to write it in")
