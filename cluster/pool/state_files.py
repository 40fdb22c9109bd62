"""Files of states that the S-worker keeps, from which the next S-worker of the session continues.

A file has the state of one sequence after some of its tokens. The next S-worker loads the state and lets the R-worker
cut the sequence's keys and values to those tokens; later tokens are computed again. Only files of the previous
S-worker are loaded. Files are saved before a step, when the cache holds no draft tokens that may yet be rejected.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import struct
import time
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np

from fastdecode import _rworker
from fastdecode.core.errors import ConfigError
from fastdecode.core.held import HeldSequence
from fastdecode.core.own_folder import make_folder
from fastdecode.core.types import RWorkerInfo, Verb, WorkerPlan

logger = logging.getLogger(__name__)

_HEAD = struct.Struct("<8sqqQ16s")
"""The beginning of a file: magic, cache id, tokens, bytes of the state, and the checksum of the state."""

_MAGIC = b"FDSTATE1"


class StateFiles:
    """Saves states of the sequences on one R-worker, one at a time, for a small share of the S-worker's time."""

    def __init__(self, folder: Path, info: RWorkerInfo) -> None:
        """Make a subfolder of ``folder`` for the R-worker that ``info`` describes. Raise ConfigError if that fails."""
        self._folder, self._epoch = folder / hashlib.sha256(info.name.encode()).hexdigest()[:16], info.epoch
        try:
            make_folder(self._folder, 0o700)
        except OSError as error:
            raise ConfigError(f"journal: {self._folder}: {error.strerror}") from None
        self._threads = ThreadPoolExecutor(1, "states")
        self._saving: Future[None] | None = None
        self._tokens: dict[int, int] = {}
        self._next_seconds = 0.0

    def load(self, states: _rworker.RWorker, held: Iterable[HeldSequence], block_size: int) -> list[HeldSequence]:
        """Load into ``states`` the saved states of the sequences ``held``, and remove all other files.

        Return the sequences that have a state, cut to the tokens that it covers.
        """
        kept = [cut for each in held if (cut := self._load(states, each, block_size))]
        wanted = {self._path(each.cache_id) for each in kept}
        for path in self._folder.iterdir():
            if path not in wanted:
                path.unlink(missing_ok=True)
        self._tokens = {each.cache_id: each.num_tokens for each in kept}
        return kept

    def before_step(self, states: _rworker.RWorker, plan: WorkerPlan) -> None:
        """Remove files of sequences that ``plan`` cuts below the saved tokens; save one state if one is due again."""
        ends = self._ends(plan)
        for cache_id, num_tokens in ends.items():
            if num_tokens < self._tokens.get(cache_id, 0):
                self._remove(cache_id)
        if time.monotonic() < self._next_seconds or (self._saving and not self._saving.done()):
            return
        behind = {each: ends.get(each, states.sequence_length(each)) for each in states.sequence_ids()}
        farthest = max(behind, key=lambda each: behind[each] - self._tokens.get(each, 0), default=None)
        if farthest is not None and behind[farthest] > self._tokens.get(farthest, 0):
            self._save(states, farthest, behind[farthest])

    def close(self) -> None:
        self._threads.shutdown()

    def remove_all(self) -> None:
        """Remove all files that this S-worker has saved; call this when the session ends for good."""
        self.close()
        for path in list(self._folder.glob(f"*.{self._epoch}.state")):
            path.unlink(missing_ok=True)

    def _ends(self, plan: WorkerPlan) -> dict[int, int]:
        """Return how many tokens ``plan`` leaves of each sequence that it truncates or releases."""
        cuts = {int(Verb.TRUNCATE), int(Verb.RELEASE)}
        return {
            cache_id: num_tokens if verb == int(Verb.TRUNCATE) else 0
            for verb, cache_id, _, num_tokens in plan.controls.tolist()
            if verb in cuts
        }

    def _save(self, states: _rworker.RWorker, cache_id: int, num_tokens: int) -> None:
        """Save the state of ``cache_id`` after its first ``num_tokens`` tokens, in the background."""
        begin = time.monotonic()
        try:
            state = states.export(cache_id, num_tokens, 0)
        except ValueError:
            state = np.zeros(0, np.uint8)
        if state.nbytes:  # empty if an abandoned step has overwritten the state
            self._saving = self._threads.submit(self._write, cache_id, num_tokens, state)
            self._tokens[cache_id] = num_tokens
        # The share of the S-worker's time that copies of states may take
        share = 0.02
        self._next_seconds = time.monotonic() + (time.monotonic() - begin) / share

    def _write(self, cache_id: int, num_tokens: int, state: np.ndarray) -> None:
        path = self._path(cache_id)
        head = _HEAD.pack(_MAGIC, cache_id, num_tokens, state.nbytes, _checksum(state))
        try:
            with path.with_suffix(".part").open("wb") as file:
                file.write(head)
                file.write(state.data)
            path.with_suffix(".part").replace(path)
        except OSError as error:
            logger.warning("a state could not be saved for the next S-worker: %s", error)
            path.unlink(missing_ok=True)

    def _remove(self, cache_id: int) -> None:
        """Remove the file of ``cache_id`` before a control cuts or releases the sequence."""
        del self._tokens[cache_id]
        if self._saving:
            self._saving.result()
        self._path(cache_id).unlink(missing_ok=True)

    def _load(self, states: _rworker.RWorker, held: HeldSequence, block_size: int) -> HeldSequence | None:
        path = self._path(held.cache_id, self._epoch - 1)
        with contextlib.suppress(OSError, ValueError):  # no file, a damaged file, or out of memory
            num_tokens, state = _read(path, held.cache_id)
            if num_tokens <= held.num_tokens:
                states.import_(held.cache_id, num_tokens, state)
                path.replace(self._path(held.cache_id))
                blocks = held.blocks[: -(-num_tokens // block_size)]
                return HeldSequence(held.cache_id, num_tokens, blocks, least=num_tokens)
        return None

    def _path(self, cache_id: int, epoch: int | None = None) -> Path:
        return self._folder / f"{cache_id}.{self._epoch if epoch is None else epoch}.state"


def _read(path: Path, cache_id: int) -> tuple[int, np.ndarray]:
    """Return the tokens that a file's state covers, and the state. Raise OSError or ValueError for a damaged file."""
    data = path.read_bytes()
    if len(data) < _HEAD.size:
        raise ValueError(f"{path} ends too early")
    magic, found_id, num_tokens, num_bytes, checksum = _HEAD.unpack_from(data)
    state = np.frombuffer(data, np.uint8, offset=_HEAD.size).copy()
    if (magic, found_id, num_bytes) != (_MAGIC, cache_id, state.nbytes) or checksum != _checksum(state):
        raise ValueError(f"{path} is damaged")
    return num_tokens, state


def _checksum(state: np.ndarray) -> bytes:
    return _rworker.checksum(state, bytes(16))
