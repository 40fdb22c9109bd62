"""R-workers paired with states of their sequences in the S-worker's process. The pool sees each pair as one R-worker.

The R-worker computes a hybrid model's attending layers, this process its recurrent layers, for the same sequences.
Both get the plan, and each gets the rows of its layers. So a lost R-worker takes its sequences' states with it, and
nothing above the pool distinguishes pairs from R-workers.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fastdecode import _rworker
from fastdecode.cluster.pool.remote_stores import RemoteJournal
from fastdecode.cluster.pool.routed_rows import Arrays
from fastdecode.cluster.pool.state_files import StateFiles
from fastdecode.cluster.pool.worker import PoolWorker
from fastdecode.cluster.r_worker.host import RWorkerSize, begin_step, block_bytes, end_step, make_rworker
from fastdecode.core.auditing import AuditAnswer, AuditQuestion
from fastdecode.core.held import HeldSequence
from fastdecode.core.state_room import COUNTED_BLOCKS
from fastdecode.core.types import CONTROL, SPAN, RWorkerInfo, Verb, WorkerPlan, WorkerReport
from fastdecode.core.weighing import Weighing
from fastdecode.kinds import Layer
from fastdecode.kinds.layout import KVLayout

TABLE_TOKENS = 1 << 30
"""Block size in tokens of the states' cache. Tokens need no room there, so each sequence takes one block."""

_NUM_BYTES = struct.Struct("<q")


@dataclass(frozen=True)
class LayerParts:
    """The layers of a hybrid model, split into ``attention``, on the R-worker, and ``states``, in this process.

    ``places``: for each layer, whether it is recurrent, and its number in ``states`` or ``attention``.
    """

    attention: KVLayout
    states: KVLayout
    places: tuple[tuple[bool, int], ...]

    @classmethod
    def of(cls, layout: KVLayout) -> LayerParts:
        """Split ``layout``, which has both attending and recurrent layers, into the two parts."""
        parts: tuple[list[Layer], list[Layer]] = ([], [])
        places = []
        for layer in layout.layers:
            part = parts[not layer.caches_rows]
            places.append((not layer.caches_rows, len(part)))
            part.append(layer)
        attending = tuple(each.reading(places[each.reads][1]) if each.reads >= 0 else each for each in parts[0])
        weights = {places[layer][1]: each for layer, each in layout.weights.items()}
        states = replace(layout, layers=tuple(parts[1]), kv_port="", weights={})
        return cls(replace(layout, layers=attending, weights=weights), states, tuple(places))

    @property
    def attending(self) -> list[int]:
        """Numbers of the layers that attend."""
        return [number for number, (is_state, _) in enumerate(self.places) if not is_state]

    @property
    def state_bytes(self) -> int:
        """Bytes that one sequence's states take in this process, rounded up to whole blocks."""
        return self.blocks_of_state * block_bytes(self.states, TABLE_TOKENS)

    @property
    def blocks_of_state(self) -> int:
        """Blocks that a sequence takes in this process's cache: for its states, and an empty one for its tokens."""
        layers = list(self.states.layers)
        return _rworker.state_blocks(layers, self.states.kv_dtype, TABLE_TOKENS) + 1


@dataclass(frozen=True)
class StateKeeper:
    """Keeps up to ``most_states`` states beside each R-worker, on the S-worker's threads and cores.

    The system commits memory when a sequence first gets a state. ``folder``: for files of states, if R-workers keep
    their sequences for the next S-worker; else None.
    """

    most_states: int
    num_threads: int
    cores: tuple[int, ...]
    folder: Path | None = None

    def pair(self, worker: PoolWorker, info: RWorkerInfo, parts: LayerParts) -> tuple[StatePair, RWorkerInfo]:
        """Pair the open ``worker``, for the attending layers, with new states; return the pair and its description.

        ``info``: the description of ``worker``. The pair holds the sequences whose states were saved by an earlier
        S-worker. Pairs park no prefixes.
        """
        num_bytes = self.most_states * parts.state_bytes
        states = make_rworker(parts.states, TABLE_TOKENS, RWorkerSize(num_bytes, self.num_threads, self.cores))
        files = StateFiles(self.folder, info) if self.folder else None
        pair = StatePair(worker, parts, states, files)
        held = pair.resume(info.held, info.block_size)
        return pair, replace(info, state_blocks=COUNTED_BLOCKS, park_after=None, held=held)


class StatePair(PoolWorker):
    """An open R-worker, ``r_worker``, for attending layers, and a cache in this process for its sequences' states.

    ``submit`` computes a recurrent layer at once, on the model's cores. A report's busy times cover only the
    attending layers; the time of recurrent layers counts as the model's.
    """

    def __init__(
        self, r_worker: PoolWorker, parts: LayerParts, states: _rworker.RWorker, files: StateFiles | None = None
    ) -> None:
        self.name, self.r_worker = r_worker.name, r_worker
        self._parts, self._states, self._files = parts, states, files
        self._blocks_of_state = parts.blocks_of_state
        self._in_step = False
        self._is_done: dict[int, bool] = {}

    def resume(self, held: Sequence[HeldSequence], block_size: int) -> tuple[HeldSequence, ...]:
        """Load the saved states of the sequences ``held`` by the R-worker, and let it cut or release the sequences.

        Return the sequences of which the R-worker and this process now hold equally many tokens.
        """
        kept = self._files.load(self._states, held, block_size) if self._files else []
        lengths = {each.cache_id: each.num_tokens for each in kept}
        controls = [
            (
                int(Verb.TRUNCATE if each.cache_id in lengths else Verb.RELEASE),
                each.cache_id,
                0,
                lengths.get(each.cache_id, 0),
            )
            for each in held
            if lengths.get(each.cache_id, 0) < each.num_tokens
        ]
        if controls:
            self.r_worker.begin_step(WorkerPlan(np.array(controls, CONTROL), (np.zeros(0, SPAN),)))
            self.r_worker.begun()
            self.r_worker.abandon_step()
        return tuple(kept)

    def begin_step(self, plan: WorkerPlan) -> None:
        if self._files:
            self._files.before_step(self._states, plan)
        self._is_done.clear()
        self.r_worker.begin_step(plan)
        begin_step(self._states, plan)
        self._in_step = True

    def begun(self) -> None:
        self.r_worker.begun()

    def submit(self, mini_batch: int, layer: int, arrays: Arrays) -> None:
        is_state, number = self._parts.places[layer]
        self._is_done[mini_batch] = is_state
        if is_state:
            self._states.run(mini_batch, number, *arrays)
        else:
            self.r_worker.submit(mini_batch, number, arrays)

    def ready(self, mini_batch: int) -> bool:
        return self._is_done[mini_batch] or self.r_worker.ready(mini_batch)

    def wait(self, mini_batch: int) -> None:
        if not self._is_done[mini_batch]:
            self.r_worker.wait(mini_batch)

    def share(self, mini_batch: int, layer: int, counts: np.ndarray) -> None:
        self.r_worker.share(mini_batch, self._parts.places[layer][1], counts)

    def weigh(self, asked: Weighing) -> Callable[[], np.ndarray]:
        layers = tuple(self._parts.places[layer][1] for layer in asked.layers)
        return self.r_worker.weigh(replace(asked, layers=layers))

    def audit(self, asked: Sequence[AuditQuestion]) -> Callable[[], list[AuditAnswer]]:
        return self.r_worker.audit([replace(each, layer=self._parts.places[each.layer][1]) for each in asked])

    def end_step(self) -> None:
        self.r_worker.end_step()

    def ended(self) -> WorkerReport:
        report = self.r_worker.ended()
        states = end_step(self._states)
        self._in_step = False
        held = (self._states.num_blocks - states.blocks_free) // self._blocks_of_state
        return replace(
            report,
            busy_start=self._of_all_layers(report.busy_start),
            busy_end=self._of_all_layers(report.busy_end),
            blocks_free=report.blocks_free - COUNTED_BLOCKS * held,
        )

    def _of_all_layers(self, moments: np.ndarray) -> np.ndarray:
        """Return ``moments``, [num_mini_batches, attending layers], with zeros for the other layers."""
        found = np.zeros((len(moments), len(self._parts.places)))
        found[:, self._parts.attending] = moments
        return found

    def abandon_step(self) -> None:
        self.r_worker.abandon_step()
        if self._in_step:
            self._in_step = False
            self._states.abandon_step()

    def export(self, sequence_id: int, start: int, num_tokens: int | None) -> np.ndarray:
        """See ``PoolWorker``. Returns the length of the R-worker's export (int64), that export, and layer states."""
        if num_tokens == 0:  # the state alone
            parts = [np.zeros(0, np.uint8), self._states.export(sequence_id, start, 0)]
        else:
            parts = [each.export(sequence_id, start, num_tokens) for each in (self.r_worker, self._states)]
        return np.concatenate([np.frombuffer(_NUM_BYTES.pack(parts[0].nbytes), np.uint8), *parts])

    def import_(self, sequence_id: int, num_tokens: int, data: np.ndarray, start: int) -> None:
        if len(data) < _NUM_BYTES.size:
            raise ValueError(f"import: {len(data)} bytes do not fit a sequence whose states the S-worker keeps")
        (num_bytes,) = _NUM_BYTES.unpack(data[: _NUM_BYTES.size].tobytes())
        first, second = np.split(data[_NUM_BYTES.size :], [num_bytes])
        if num_tokens:
            self.r_worker.import_(sequence_id, num_tokens, first, start)
        self._states.import_(sequence_id, num_tokens, second, start)

    @property
    def journal(self) -> RemoteJournal | None:
        return self.r_worker.journal

    def break_off(self) -> None:
        self.r_worker.break_off()
        self._states.close()
        if self._files:
            self._files.close()
            self._files = None  # keeps ``close`` from removing the files, which the next S-worker needs

    def close(self) -> None:
        self._in_step = False
        self.r_worker.close()
        self._states.close()
        if self._files:
            self._files.remove_all()
