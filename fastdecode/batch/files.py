"""A batch's two files: what is asked, and what has been answered, by this run or one before it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from fastdecode.batch.lines import BatchLine, read_line
from fastdecode.errors import ConfigError

HALF_WRITTEN = b'{"id": "batch_req-'
"""How every answer begins: of a file that ends in anything else nothing is cut off."""


class BatchInput:
    """The requests of an input file, read line by line, since it may be larger than memory."""

    def __init__(self, path: str) -> None:
        """ConfigError for a file that cannot be read, a line that is no request, or a custom_id that comes twice."""
        if not Path(path).is_file():
            raise ConfigError(f"{path}: must be a file: it is read twice")
        self._path = path
        self.custom_ids: set[str] = set()
        for line in self:
            if line.custom_id in self.custom_ids:
                raise ConfigError(f"{path}: custom_id {line.custom_id!r} comes twice")
            self.custom_ids.add(line.custom_id)

    def __iter__(self) -> Iterator[BatchLine]:
        """All requests, in order."""
        try:
            with Path(self._path).open(encoding="utf-8") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        yield read_line(text, number)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{self._path}: cannot be read: {error}") from None
        except ConfigError as error:
            raise ConfigError(f"{self._path}: {error}") from None


class BatchOutput:
    """Answers, each written as soon as it is there: after a crash all but the last, half-written one are kept."""

    def __init__(self, path: str, custom_ids: set[str]) -> None:
        """Go on with ``path`` where it exists; ConfigError unless it answers requests of ``custom_ids``."""
        self.done: set[str] = set()
        keep = 0
        try:
            self._file = Path(path).open("ab+")  # noqa: SIM115 (closed by __exit__)
            self._file.seek(0)
            for number, text in enumerate(self._file, 1):
                if text.endswith(b"\n"):
                    self.done.add(_custom_id(path, number, text, custom_ids))
                    keep += len(text)
                elif not text.startswith(HALF_WRITTEN[: len(text)]):
                    raise _no_answer(path, number)
            self._file.truncate(keep)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None

    def write(self, line: dict[str, Any]) -> None:
        """Append one output line; it survives the end of this process, however that comes."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self.done.add(line["custom_id"])

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()


def _custom_id(path: str, number: int, text: bytes, custom_ids: set[str]) -> str:
    try:
        answer = json.loads(text)
        custom_id = answer["custom_id"]
        is_answer = isinstance(custom_id, str) and isinstance(answer["response"], dict)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_answer = False
    if not is_answer:
        raise _no_answer(path, number)
    if custom_id not in custom_ids:
        raise ConfigError(f"{path}: line {number} answers {custom_id!r}, which the input does not ask")
    return str(custom_id)


def _no_answer(path: str, number: int) -> ConfigError:
    return ConfigError(f"{path}: line {number} is no answer of a batch; give another output file")
