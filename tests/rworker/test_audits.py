"""The parts of an audit in an R-worker: rows attended again, one layer's rows, and checksums of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Harness, Layer, Rows, random_rows, table
from .oracle import to_bits

APPEND, ATTEND, PARTIAL, READ = range(4)
LAYERS = {
    "grouped": Layer(6, 2, 64, 64),
    "one head": Layer(8, 1, 128, 128),
    "window": Layer(4, 2, 64, 32, window=700),
    "chunks": Layer(4, 2, 64, 64, window=512, chunked=True),
    "sinks": Layer(4, 2, 64, 64, sinks=(0.5, 1.0, -1.0, 0.0), soft_cap=5.0),
}
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8"), ("float32", "int4")]


class Caught(Harness):
    """A harness whose every row is attended again within its step, and once the step has ended."""

    def again(self, sequence_id: int, rows: Rows, context_len: int) -> np.ndarray:
        """Attend all of the rows again, one after the other, and return their outputs."""
        bits = to_bits(rows.q, self.model_dtype)
        ask = self.worker.attend_again
        return np.concatenate(
            [ask(sequence_id, 0, context_len + row, ATTEND, bits[row : row + 1]) for row in range(len(bits))]
        )

    def step_again(self, batch: dict[int, Rows]) -> None:
        """Run one step of ``batch``; check that each row has the same bits again, before and after the step's end."""
        contexts = {each: self.lengths.get(each, 0) for each in batch}
        spans = [(each, contexts[each], len(rows.q), ATTEND) for each, rows in batch.items()]
        q, k, v = (
            to_bits(np.concatenate([getattr(rows, name) for rows in batch.values()]), self.model_dtype)
            for name in "qkv"
        )
        out = np.zeros((len(q), self.layer.num_heads, self.layer.value_head_dim), q.dtype)
        self.worker.begin_step(table([]), [table(spans)])
        self.worker.run(0, 0, q, k, v, out)
        for ends in (False, True):
            first = 0
            for each, rows in batch.items():
                found = self.again(each, rows, contexts[each])
                assert np.array_equal(found.view(np.uint8), out[first : first + len(rows.q)].view(np.uint8)), each
                first += len(rows.q)
            if not ends:
                self.worker.end_step()
        self.lengths |= {each: contexts[each] + len(rows.q) for each, rows in batch.items()}


@pytest.mark.parametrize(("model_dtype", "kv_dtype"), DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_a_row_attended_again_has_the_same_bits(name: str, model_dtype: str, kv_dtype: str) -> None:
    layer, rng = LAYERS[name], np.random.default_rng(3)
    options = {"model_dtype": model_dtype, "kv_dtype": kv_dtype, "num_threads": 2, "block_size": 32}
    cache = Caught(layer, options)
    for counts in ({1: 530, 2: 7}, {1: 1, 2: 1}, {1: 3, 2: 40, 3: 1}, {1: 1, 2: 1, 3: 1}):
        cache.step_again({each: random_rows(rng, layer, count) for each, count in counts.items()})


@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
def test_partial_results_have_the_same_bits_again(kv_dtype: str) -> None:
    """A sequence's tail and a closed range that it reads give the same partial results again."""
    layer, rng = LAYERS["grouped"], np.random.default_rng(4)
    worker = Harness(layer, {"kv_dtype": kv_dtype, "num_blocks": 256}).worker
    whole = random_rows(rng, layer, 1024 + 1100)
    none = np.zeros((0, 6, 64), np.float32)
    worker.begin_step(table([]), [table([(1, 0, 1024, APPEND), (2, 0, 1100, APPEND)])])
    worker.run(0, 0, none, whole.k, whole.v, none)
    worker.end_step()
    rows = random_rows(rng, layer, 2)
    worker.begin_step(table([]), [table([(1, 2124, 2, READ), (2, 1100, 2, PARTIAL)])])
    partials = np.zeros((2 + 2 * 2, 6, 66), np.float32)
    worker.run(0, 0, np.concatenate([rows.q, rows.q]), rows.k, rows.v, none, partials)
    for row in range(2):
        query = rows.q[row : row + 1]
        assert np.array_equal(worker.attend_again(1, 0, 2124 + row, READ, query), partials[row : row + 1])
        found = worker.attend_again(2, 0, 1100 + row, PARTIAL, query)
        assert np.array_equal(found, partials[2 + 2 * row : 4 + 2 * row])
    worker.end_step()


@pytest.mark.parametrize("num_tokens", [63, 64, 77, 300])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("name", LAYERS)
def test_another_cache_attends_exported_blocks_with_the_same_bits(name: str, kv_dtype: str, num_tokens: int) -> None:
    """Full blocks are copied as they are stored, in an open step that may just have filled one."""
    layer, rng = LAYERS[name], np.random.default_rng(7)
    cache = Harness(layer, {"kv_dtype": kv_dtype, "block_size": 16})
    cache.step({8: random_rows(rng, layer, 20)})
    cache.step({1: random_rows(rng, layer, num_tokens)})
    rows = random_rows(rng, layer, 1)
    out = np.zeros((1, layer.num_heads, layer.value_head_dim), np.float32)
    cache.worker.begin_step(table([]), [table([(1, num_tokens, 1, ATTEND)])])
    cache.worker.run(0, 0, rows.q, rows.k, rows.v, out)
    exported = cache.worker.export_layer(1, 0, as_blocks=True)
    length, full = num_tokens + 1, (num_tokens + 1) // 16 * 16
    assert len(exported) == len(cache.worker.export_layer(1, 0))
    other, cut = Harness(layer, {"kv_dtype": kv_dtype, "block_size": 16}).worker, full * len(exported) // length
    other.import_blocks(9, full, exported[:cut])
    if full < length:
        other.import_(9, length - full, exported[cut:], full)
    assert np.array_equal(other.attend_again(9, 0, num_tokens, ATTEND, rows.q), out)
    cache.worker.end_step()
    assert np.array_equal(cache.worker.export(1), other.export(9))


def test_blocks_that_are_larger_than_their_tokens_are_not_exported() -> None:
    layer = Layer(4, 2, 40, 40)
    cache = Harness(layer, {"block_size": 16})
    cache.step({1: random_rows(np.random.default_rng(7), layer, 20)})
    with pytest.raises(ValueError, match="blocks of layer 0 are larger than their tokens"):
        cache.worker.export_layer(1, 0, as_blocks=True)


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int4"])
def test_another_cache_attends_exported_rows_with_the_same_bits(kv_dtype: str) -> None:
    """The exporting cache has other blocks and an open step; the exported rows are those of ``export``."""
    layer, rng = LAYERS["grouped"], np.random.default_rng(5)
    cache = Harness(layer, {"kv_dtype": kv_dtype})
    cache.step({1: random_rows(rng, layer, 77)})
    rows = random_rows(rng, layer, 1)
    out = np.zeros((1, 6, 64), np.float32)
    cache.worker.begin_step(table([]), [table([(1, 77, 1, ATTEND)])])
    cache.worker.run(0, 0, rows.q, rows.k, rows.v, out)
    exported = cache.worker.export_layer(1, 0)
    other = Harness(layer, {"kv_dtype": kv_dtype, "block_size": 64}).worker
    other.import_(9, 78, exported)
    assert np.array_equal(other.attend_again(9, 0, 77, ATTEND, rows.q), out)
    cache.worker.end_step()
    assert np.array_equal(cache.worker.export(1), exported)


def filled(**options: Any) -> Harness:
    """Return a harness with checksums and one sequence of 70 tokens in blocks of 16."""
    cache = Harness(LAYERS["grouped"], options)
    cache.worker.keep_checksums()
    cache.step({1: random_rows(np.random.default_rng(6), cache.layer, 70)})
    return cache


@pytest.mark.parametrize("bit", [0, 12345, (1 << 20) + 3])
def test_a_flipped_bit_is_found_in_its_block_alone(bit: int) -> None:
    worker = filled().worker
    assert worker.find_damage(1) == -1
    worker.flip_bit(1, 0, 40, bit)
    assert worker.find_damage(1) == 2 == worker.find_damage(1, 48, 0)
    assert worker.find_damage(1, 47) == worker.find_damage(1, 32) == -1
    worker.flip_bit(1, 0, 40, bit)
    assert worker.find_damage(1) == -1
    worker.flip_bit(1, 0, 69, bit)  # The block is not full, so it has no checksum yet.
    assert worker.find_damage(1) == -1


def test_checksums_follow_blocks_that_are_cut_shared_and_used_again() -> None:
    """Cuts, forks, rows that fill a block again, and reused blocks of ended sequences cause no false alarm."""
    cache = filled(num_blocks=12)
    rng = np.random.default_rng(7)
    for controls, batch in (
        ([(TRUNCATE, 1, 0, 40)], {1: 30}),
        ([(FORK, 2, 1, 50)], {1: 3, 2: 20}),
        ([(TRUNCATE, 1, 0, 33), (TRUNCATE, 2, 0, 48)], {1: 1, 2: 1}),
        ([(RELEASE, 1, 0, 0)], {2: 16, 3: 90}),
    ):
        for _, each, _, num_tokens in controls:
            cache.lengths[each] = num_tokens
        cache.step({each: random_rows(rng, cache.layer, count) for each, count in batch.items()}, controls=controls)
        for each in cache.worker.sequence_ids():
            assert cache.worker.find_damage(each) == -1
    data = cache.worker.export(2)
    cache.worker.begin_step(table([(RELEASE, 2, 0, 0)]), [])
    cache.worker.end_step()
    cache.worker.import_(4, cache.lengths[2], data)
    assert cache.worker.find_damage(4) == -1
    cache.worker.flip_bit(4, 0, 5, 77)
    assert cache.worker.find_damage(4) == 0


def test_what_cannot_be_asked_again_is_refused() -> None:
    cache = filled()
    query = np.zeros((1, 6, 64), np.float32)
    ask = cache.worker.attend_again
    with pytest.raises(ValueError, match="position is 70, and sequence 1 has 70 tokens"):
        ask(1, 0, 70, ATTEND, query)
    with pytest.raises(ValueError, match="mode must be 1"):
        ask(1, 0, 69, APPEND, query)
    with pytest.raises(ValueError, match="layer is 1; there are 1"):
        ask(1, 1, 69, ATTEND, query)
    with pytest.raises(KeyError, match="sequence 5 is unknown"):
        ask(5, 0, 1, ATTEND, query)
    with pytest.raises(ValueError, match="it holds 70 tokens; a closed range"):
        ask(1, 0, 80, READ, query)
    with pytest.raises(ValueError, match="query must be"):
        ask(1, 0, 69, ATTEND, query[0])
    cache.worker.begin_step(table([]), [table([(1, 70, 1, ATTEND)])])
    with pytest.raises(ValueError, match="layer 0 was never submitted"):
        ask(1, 0, 69, ATTEND, query)
    cache.worker.abandon_step()
    with pytest.raises(ValueError, match="layer is 3"):
        cache.worker.find_damage(1, layer=3)


@pytest.mark.parametrize("isa", _rworker.supported_isas())
def test_every_instruction_set_attends_again_alike(isa: str) -> None:
    layer, rng = LAYERS["grouped"], np.random.default_rng(8)
    cache = Caught(layer, {"isa": isa, "model_dtype": "bfloat16", "kv_dtype": "bfloat16"})
    for count in (20, 1, 5):
        cache.step_again({1: random_rows(rng, layer, count)})
