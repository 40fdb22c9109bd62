"""Two caches of unlike block sizes and instruction sets against plain lists, under random operations."""

from __future__ import annotations

import numpy as np
from helpers.examples import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, multiple, rule

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Layer, make_worker, table
from .quantised import KV_DTYPES, stored

LAYER = Layer(2, 1, 8, 8, 0.3)
NUM_BLOCKS = 24
BLOCK_SIZES = (16, 64)


def rows_of(tokens: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return keys and values, float32 [num_tokens, 1, 8], whose elements differ and are exact in bfloat16."""
    numbers, dims = np.array(tokens, np.int64).reshape(-1, 1, 1), np.arange(8)
    keys, values = ((numbers + dims * stride) % 256 - 100 for stride in (37, 101))
    return keys.astype(np.float32), values.astype(np.float32)


class Caches(RuleBasedStateMachine):
    """Two caches and their model: ``tokens[w][id]`` are the numbers that make worker w's rows of a sequence."""

    sequences = Bundle("sequences")

    def __init__(self) -> None:
        super().__init__()
        self.workers: list[_rworker.RWorker] = []
        self.tokens: list[dict[int, list[int]]] = [{}, {}]
        self.next_id = self.next_token = 0

    @initialize(kv_dtype=st.sampled_from(KV_DTYPES))
    def start(self, kv_dtype: str) -> None:
        self.kv_dtype = kv_dtype
        isas = (_rworker.supported_isas()[0], _rworker.supported_isas()[-1])
        self.workers = [
            make_worker(LAYER, block_size=size, num_blocks=NUM_BLOCKS, isa=isa, kv_dtype=kv_dtype)
            for size, isa in zip(BLOCK_SIZES, isas, strict=True)
        ]

    def teardown(self) -> None:
        for worker in self.workers:
            worker.close()

    def new_id(self) -> int:
        self.next_id += 1
        return self.next_id

    def blocks(self, worker: int, num_tokens: int) -> int:
        return -(-num_tokens // BLOCK_SIZES[worker])

    def control(self, worker: int, verb: int, sequence_id: int, source_id: int, num_tokens: int) -> bool:
        """Apply a control. Return False where the cache had no block for the copy of a partial one."""
        try:
            self.workers[worker].begin_step(table([(verb, sequence_id, source_id, num_tokens)]), [])
        except ValueError as error:
            assert "out of blocks" in str(error) and self.workers[worker].blocks_free == 0
            return False
        self.workers[worker].end_step()
        return True

    @rule(target=sequences, worker=st.integers(0, 1), count=st.integers(1, 100))
    def open(self, worker: int, count: int) -> object:
        place = (worker, self.new_id())
        return place if self.append(place, count) else multiple()

    @rule(place=sequences, count=st.integers(1, 100))
    def grow(self, place: tuple[int, int], count: int) -> None:
        self.append(place, count)

    @rule(place=sequences, count=st.integers(1, 100))
    def write_and_abandon(self, place: tuple[int, int], count: int) -> None:
        """Write rows in a step that is not committed; nothing of them may stay."""
        self.append(place, count, commit=False)

    def append(self, place: tuple[int, int], count: int, commit: bool = True) -> bool:
        worker, sequence_id = place
        old = self.tokens[worker].get(sequence_id, [])
        new = [self.next_token + i for i in range(count)]
        keys, values = rows_of(new)
        needed = self.blocks(worker, len(old) + count) - self.blocks(worker, len(old))
        fits = needed <= self.workers[worker].blocks_free
        try:
            self.workers[worker].begin_step(table([]), [table([(sequence_id, len(old), count, 0)])])
        except ValueError as error:
            assert "out of blocks" in str(error) and not fits
            return False
        assert fits
        none = np.zeros((0, 2, 8), np.float32)
        self.workers[worker].submit(0, 0, none, keys, values, none)
        self.workers[worker].wait(0)
        self.next_token += count
        if commit:
            self.workers[worker].end_step()
            self.tokens[worker][sequence_id] = old + new
        else:
            self.workers[worker].abandon_step()
        return True

    @rule(target=sequences, place=sequences, part=st.floats(0, 1))
    def fork(self, place: tuple[int, int], part: float) -> object:
        worker, source_id = place
        kept, sequence_id = int(part * len(self.tokens[worker][source_id])), self.new_id()
        if not self.control(worker, FORK, sequence_id, source_id, kept):
            return multiple()
        self.tokens[worker][sequence_id] = self.tokens[worker][source_id][:kept]
        return worker, sequence_id

    @rule(place=sequences, part=st.floats(0, 1))
    def truncate(self, place: tuple[int, int], part: float) -> None:
        worker, sequence_id = place
        kept = int(part * len(self.tokens[worker][sequence_id]))
        if self.control(worker, TRUNCATE, sequence_id, 0, kept):
            self.tokens[worker][sequence_id] = self.tokens[worker][sequence_id][:kept]

    @rule(place=consumes(sequences))
    def release(self, place: tuple[int, int]) -> None:
        assert self.control(place[0], RELEASE, place[1], 0, 0)
        del self.tokens[place[0]][place[1]]

    @rule(target=sequences, place=sequences, worker=st.integers(0, 1))
    def move(self, place: tuple[int, int], worker: int) -> object:
        """Export a sequence, and import it into the same cache or the other one."""
        tokens = self.tokens[place[0]][place[1]]
        data, sequence_id = self.workers[place[0]].export(place[1]), self.new_id()
        fits = self.blocks(worker, len(tokens)) <= self.workers[worker].blocks_free
        try:
            self.workers[worker].import_(sequence_id, len(tokens), data)
        except ValueError as error:
            assert "out of blocks" in str(error) and not fits
            return multiple()
        assert fits
        assert self.workers[worker].export(sequence_id).tobytes() == data.tobytes()
        self.tokens[worker][sequence_id] = list(tokens)
        return worker, sequence_id

    @invariant()
    def caches_hold_the_tokens(self) -> None:
        for worker, tokens in zip(self.workers, self.tokens, strict=True):
            assert worker.sequence_ids() == sorted(tokens)
            for sequence_id, wanted in tokens.items():
                both = zip(worker.read_tokens(sequence_id, 0), rows_of(wanted), (True, False), strict=True)
                for held, rows, keys in both:
                    np.testing.assert_array_equal(held, stored(rows, self.kv_dtype, keys))

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        for worker, tokens in zip(self.workers, self.tokens, strict=True):
            tables = [worker.block_table(sequence_id) for sequence_id in tokens]
            found = worker.statistics()
            assert found["blocks_used"] == len({block for blocks in tables for block in blocks})
            assert found["blocks_used"] + found["blocks_free"] == NUM_BLOCKS
            assert found["tokens"] == sum(map(len, tokens.values()))
            assert [len(blocks) for blocks in tables] == [
                -(-len(wanted) // worker.block_size) for wanted in tokens.values()
            ]


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)
