"""A batch's two files: the input with requests, and the output with answers of this run or an earlier one."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

from fastdecode.batch.lines import BatchLine, read_line
from fastdecode.core.errors import ConfigError


class BatchInput:
    """The requests of an input file, read line by line, since it may be larger than memory."""

    def __init__(self, path: str) -> None:
        """Read the file once, and set ``custom_ids`` and ``problems``.
        ``problems`` has a sentence for each line that gets no answer: a line that is no JSON object with a custom_id,
        or that repeats a custom_id.

        Raises:
          ConfigError: ``path`` is no regular file, cannot be read, or has no line that can be answered.
        """
        if not Path(path).is_file():
            raise ConfigError(f"{path}: must be a regular file: it is read twice")
        self._path = path
        self.custom_ids: set[str] = set()
        self.problems: list[str] = []
        for _, found in self._lines():
            if isinstance(found, BatchLine):
                self.custom_ids.add(found.custom_id)
            else:
                self.problems.append(f"{path}: {found}")
        if not self.custom_ids:
            raise ConfigError("; ".join(self.problems[:3]) or f"{path}: holds no request")

    def __iter__(self) -> Iterator[BatchLine]:
        """Yield the requests in order, each custom_id once."""
        return (found for _, found in self._lines() if isinstance(found, BatchLine))

    def _lines(self) -> Iterator[tuple[int, BatchLine | str]]:
        """Yield each line's number, with its request or a sentence that says what is wrong with the line."""
        seen: set[str] = set()
        try:
            with Path(self._path).open("rb") as file:
                for number, text in enumerate(file, 1):
                    if text.strip():
                        yield number, _parse_unseen(text, number, seen)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror or error}") from None


class BatchOutput:
    """The output file. Each answer is written at once, so that a crash loses at most the last, half-written one.
    ``done``: custom_ids with an answer. ``failed``: custom_ids whose answer is an error.
    """

    def __init__(self, path: str, custom_ids: set[str], model: str, retry_failed: bool = False) -> None:
        """Open ``path``, or continue it if it exists. With ``retry_failed``, first remove answers that are errors.

        Raises:
          ConfigError: ``path`` is no regular file, cannot be written, or has answers to requests outside
            ``custom_ids`` or of a model other than ``model``. The file is then unchanged.
        """
        self.done: set[str] = set()
        self.failed: set[str] = set()
        if Path(path).exists() and not Path(path).is_file():
            raise ConfigError(f"{path}: must be a regular file: an interrupted run continues from the answers in it")
        try:
            self._file: BinaryIO = Path(path).open("ab+")  # noqa: SIM115 (closed by __exit__)
            self._file.truncate(self._read(path, custom_ids, model))
            if retry_failed and self.failed:
                self._file = _without(self._file, path, self.failed)
                self.done -= self.failed
                self.failed = set()
        except OSError as error:
            raise ConfigError(f"{path}: cannot be written: {error.strerror or error}") from None

    def write(self, line: dict[str, Any]) -> None:
        """Append the output line ``line``; it survives a crash of this process."""
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self._count(line)

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._file.close()

    def _read(self, path: str, custom_ids: set[str], model: str) -> int:
        """Return the size in bytes of the file's complete answers; add their custom_ids to ``done`` and ``failed``."""
        keep = 0
        self._file.seek(0)
        # A half-written last line is removed only if it begins like an answer: the file may be given by mistake
        half_written = b'{"id": "batch_req-'
        for number, text in enumerate(self._file, 1):
            if text.endswith(b"\n"):
                self._count(_checked_answer(path, number, text, custom_ids, model))
                keep += len(text)
            elif not text.startswith(half_written[: len(text)]):
                raise _no_answer(path, number)
        return keep

    def _count(self, line: dict[str, Any]) -> None:
        self.done.add(line["custom_id"])
        ok = 200
        if line["response"].get("status_code") != ok:
            self.failed.add(line["custom_id"])


def _parse_unseen(text: bytes, number: int, seen: set[str]) -> BatchLine | str:
    """Return the request in line ``number``, or a sentence about the line's error. Add its custom_id to ``seen``."""
    try:
        line = read_line(text, number)
    except ConfigError as error:
        return str(error)
    if line.custom_id in seen:
        return f"line {number}: custom_id {line.custom_id!r} was asked before"
    seen.add(line.custom_id)
    return line


def _checked_answer(path: str, number: int, text: bytes, custom_ids: set[str], model: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
        custom_id = answer["custom_id"]
        is_answer = isinstance(custom_id, str) and isinstance(answer["response"], dict)
    except (ValueError, TypeError, KeyError, RecursionError):
        is_answer = False
    if not is_answer:
        raise _no_answer(path, number)
    if custom_id not in custom_ids:
        raise ConfigError(f"{path}: line {number} answers {custom_id!r}, which is not in the input")
    body = answer["response"].get("body")
    other = body.get("model", model) if isinstance(body, dict) else model
    if not _same_model(other, model):
        raise ConfigError(
            f"{path}: line {number} was answered by model {other!r}, and this run has {model!r}; "
            f"give another output file"
        )
    return dict(answer)


def _same_model(one: Any, other: str) -> bool:
    """Return whether two model names are equal, or are paths of the same folder."""
    return one == other or (isinstance(one, str) and Path(one).resolve() == Path(other).resolve())


def _without(file: BinaryIO, path: str, custom_ids: set[str]) -> BinaryIO:
    """Rewrite the file at ``path`` without the answers to ``custom_ids``; return the new file, opened again."""
    new = f"{path}.retry"
    try:
        with file, Path(new).open("wb") as kept:
            file.seek(0)
            kept.writelines(text for text in file if json.loads(text)["custom_id"] not in custom_ids)
        os.replace(new, path)  # noqa: PTH105 (takes two names, not a Path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(new).unlink(missing_ok=True)
        raise
    return Path(path).open("ab+")


def _no_answer(path: str, number: int) -> ConfigError:
    return ConfigError(f"{path}: line {number} is no answer of a batch; give another output file")
