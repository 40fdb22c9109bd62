"""Exported sequences are imported into another cache bit for bit, and nothing is left half done."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import PATIENCE_SECONDS

from fastdecode import _rworker

from .harness import FORK, RELEASE, TRUNCATE, Layer, make_worker, random_rows, table
from .oracle import from_bits, to_bits
from .quantised import KV_DTYPES, exported

LAYERS = [Layer(4, 2, 7, 24, 0.3), Layer(4, 4, 72, 5, 0.3)]
MODEL_DTYPE = {dtype: dtype for dtype in KV_DTYPES} | {"int8": "float32", "int4": "bfloat16"}
ISAS = _rworker.supported_isas()
LENGTH = 83


def two_layers(kv_dtype: str, **options: Any) -> _rworker.RWorker:
    return make_worker(LAYERS[0], layers=LAYERS, model_dtype=MODEL_DTYPE[kv_dtype], kv_dtype=kv_dtype, **options)


def feed(
    worker: _rworker.RWorker, kv_dtype: str, span: tuple[int, int, int, int], seed: int, spoil: bool = False
) -> Any:
    """Run one step of one sequence; return o of both layers, and k and v as sent. ``spoil`` makes all NaN."""
    outputs, payload = [], []
    worker.begin_step(table([]), [table([span])])
    for index, layer in enumerate(LAYERS):
        rows = random_rows(np.random.default_rng(seed + index), layer, span[2])
        q, k, v = (
            to_bits(part * np.float32("nan") if spoil else part, MODEL_DTYPE[kv_dtype])
            for part in (rows.q[: span[2] * span[3]], rows.k, rows.v)
        )
        out = np.empty((span[2] * span[3], layer.num_heads, layer.value_head_dim), q.dtype)
        worker.submit(0, index, q, k, v, out)
        worker.wait(0)
        outputs.append(out)
        payload.append((k, v))
    worker.end_step()
    return outputs, payload


def controls(worker: _rworker.RWorker, *rows: tuple[int, int, int, int]) -> None:
    worker.begin_step(table(list(rows)), [])
    worker.end_step()


def state(worker: _rworker.RWorker) -> Any:
    ids = worker.sequence_ids()
    return worker.statistics(), [(i, worker.block_table(i), worker.export(i).tobytes()) for i in ids]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bytes_are_token_major_stored_bits(kv_dtype: str) -> None:
    """The bytes are K then V, for each token of each layer, as the oracle stores them."""
    worker = two_layers(kv_dtype)
    _, payload = feed(worker, kv_dtype, (1, 0, LENGTH, 0), 0)
    rows = [[from_bits(part, MODEL_DTYPE[kv_dtype]) for part in layer] for layer in payload]
    flat = [
        [exported(part, kv_dtype, keys).reshape(LENGTH, -1) for part, keys in zip(layer, (True, False), strict=True)]
        for layer in rows
    ]
    data = worker.export(1)
    assert data.dtype == np.uint8 and data.ndim == 1
    assert data.tobytes() == b"".join(np.concatenate(layer, axis=1).tobytes() for layer in flat)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "target", "source", "kv_dtype"),
    [
        pytest.param(sizes, target, source, kv_dtype, marks=[pytest.mark.thorough] * ((h + i + j + k) % 3 > 0))
        for h, sizes in enumerate([(16, 64), (64, 16), (32, 32)])
        for i, target in enumerate(ISAS)
        for j, source in enumerate(ISAS)
        for k, kv_dtype in enumerate(KV_DTYPES)
    ],
)
def test_round_trip_between_block_sizes_and_isas(
    kv_dtype: str, source: str, target: str, sizes: tuple[int, int]
) -> None:
    """An import exports the same bytes, also where its blocks held NaN before, and where tokens are then appended."""
    first = two_layers(kv_dtype, isa=source, block_size=sizes[0])
    feed(first, kv_dtype, (1, 0, LENGTH, 0), 0)
    second = two_layers(kv_dtype, isa=target, block_size=sizes[1])
    feed(second, kv_dtype, (7, 0, 3 * LENGTH, 0), 9, spoil=True)
    controls(second, (RELEASE, 7, 0, 0))
    second.import_(5, LENGTH, first.export(1))
    assert second.export(5).tobytes() == first.export(1).tobytes()
    want, _ = feed(first, kv_dtype, (1, LENGTH, 3, 1), 5)
    got, _ = feed(second, kv_dtype, (5, LENGTH, 3, 1), 5)
    assert second.export(5).tobytes() == first.export(1).tobytes()
    for before, after in zip(want, got, strict=True):
        if source == target:
            assert before.tobytes() == after.tobytes()
        assert np.isfinite(from_bits(after, MODEL_DTYPE[kv_dtype])).all()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_pieces_are_one_sequence_bit_by_bit(kv_dtype: str) -> None:
    """Pieces that are taken while a sequence grows, in whole blocks of either size, make the same sequence.

    Their blocks held NaN before, and tokens are appended to both sequences afterwards.
    """
    first, second = two_layers(kv_dtype), two_layers(kv_dtype, block_size=32)
    feed(second, kv_dtype, (7, 0, 3 * LENGTH, 0), 9, spoil=True)
    controls(second, (RELEASE, 7, 0, 0))
    feed(first, kv_dtype, (1, 0, 50, 0), 0)
    second.import_(5, 32, first.export(1, 0, 32))
    feed(first, kv_dtype, (1, 50, 60, 0), 1)
    second.import_(5, 64, first.export(1, 32, 64), 32)
    second.import_(5, 14, first.export(1, 96), 96)
    assert second.export(5).tobytes() == first.export(1).tobytes()
    want, _ = feed(first, kv_dtype, (1, 110, 30, 1), 5)
    got, _ = feed(second, kv_dtype, (5, 110, 30, 1), 5)
    assert [o.tobytes() for o in want] == [o.tobytes() for o in got]


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_attention_after_import_has_the_same_bits(kv_dtype: str) -> None:
    """The importing R-worker has another block size, and the exporting one attends afterwards as before."""
    first, second = two_layers(kv_dtype), two_layers(kv_dtype, block_size=128, num_blocks=4)
    feed(first, kv_dtype, (1, 0, 200, 0), 0)
    second.import_(1, 200, first.export(1))
    for step in range(3):
        want, _ = feed(first, kv_dtype, (1, 200 + step, 1, 1), step)
        got, _ = feed(second, kv_dtype, (1, 200 + step, 1, 1), step)
        assert [o.tobytes() for o in want] == [o.tobytes() for o in got]


def test_an_empty_sequence_travels_too() -> None:
    worker = two_layers("float32")
    feed(worker, "float32", (1, 0, 20, 0), 0)
    controls(worker, (FORK, 2, 1, 0))
    assert worker.export(2).shape == (0,)
    worker.import_(3, 0, worker.export(2))
    assert worker.sequence_length(3) == 0 and worker.block_table(3) == []
    feed(worker, "float32", (3, 0, 5, 1), 0)
    assert worker.sequence_length(3) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (lambda data: (1, 20, data), "import: sequence 1 exists already"),
        (lambda data: (2, -1, data), "import: num_tokens is -1; it must not be negative"),
        (lambda data: (2, 19, data), r"import: data has \d+ bytes; keys and values of 19 tokens take \d+"),
        (lambda data: (2, 20, data[:-1]), "import: data has .* bytes; keys and values of 20 tokens take"),
        (lambda data: (2, 97, np.tile(data, 5)), "num_tokens is 97, and 6 free blocks of 16 tokens hold 96"),
        (lambda data: (2, 2**62, data), "import: out of blocks"),
        (
            lambda data: (2, 20, data.view(np.int8)),
            "data must be a C-contiguous uint8 array of one dimension, not int8",
        ),
        (lambda data: (2, 20, data.reshape(2, -1)), "data must be a C-contiguous uint8 array of one dimension"),
        (lambda data: (2, 20, np.repeat(data, 2)[::2]), "data must be .* with strides"),
        (lambda data: (2, 20, data, -16), "import: start is -16; it must not be negative"),
        (lambda data: (1, 20, data, 16), "import: start is 16, and sequence 1 has 20 tokens"),
        (lambda data: (1, 20, data, 20), "import: start is 20; it must be a multiple of the block size, 16"),
    ],
)
def test_import_errors_change_nothing(arguments: Callable[[np.ndarray], tuple], message: str) -> None:
    """Each error names what is wrong and what would be right, and the R-worker goes on."""
    worker = two_layers("float32", num_blocks=8)
    feed(worker, "float32", (1, 0, 20, 0), 0)
    data, before = worker.export(1), state(worker)
    with pytest.raises(ValueError, match=message):
        worker.import_(*arguments(data))
    assert state(worker) == before
    worker.import_(2, 20, data)
    assert worker.export(2).tobytes() == data.tobytes()


def test_unknown_sequence_and_open_step_are_refused() -> None:
    worker = two_layers("float32")
    feed(worker, "float32", (1, 0, 20, 0), 0)
    data, before = worker.export(1), state(worker)
    with pytest.raises(KeyError, match="sequence 2 is unknown"):
        worker.export(2)
    for piece in ((-1, 5), (0, 21), (21,), (16, -1), (2**62, 2**62)):
        with pytest.raises(ValueError, match=r"export: .* tokens from token .* on; sequence 1 has 20"):
            worker.export(1, *piece)
    with pytest.raises(KeyError, match="sequence 2 is unknown"):
        worker.import_(2, 20, data, 16)
    worker.begin_step(table([]), [table([(1, 20, 4, 1)])])
    with pytest.raises(ValueError, match="export: a step is open; end_step or abandon_step comes first"):
        worker.export(1)
    with pytest.raises(ValueError, match="read_tokens: a step is open"):
        worker.read_tokens(1, 0)
    with pytest.raises(ValueError, match="import: a step is open"):
        worker.import_(2, 20, data)
    worker.abandon_step()
    assert state(worker) == before
    worker.close()
    for call in (lambda: worker.export(1), lambda: worker.import_(2, 20, data), worker.statistics):
        with pytest.raises(ValueError, match="closed"):
            call()


def test_statistics_count_what_happened() -> None:
    """The statistics count 40 tokens, a fork of 35 (two blocks shared), and a step of one row each."""
    worker = two_layers("float32", num_blocks=10)
    assert worker.statistics() == {
        "blocks_used": 0, "blocks_free": 10, "blocks_shared": 0, "sequences": 0, "incoming": 0, "tokens": 0,
        "bytes_read": 0, "bytes_committed": 0,
    }  # fmt: skip
    feed(worker, "float32", (1, 0, 40, 0), 0)
    controls(worker, (FORK, 2, 1, 35))
    found = worker.statistics()
    assert (found["blocks_used"], found["blocks_free"], found["blocks_shared"]) == (4, 6, 2)
    assert (found["sequences"], found["tokens"], found["bytes_read"]) == (2, 75, 0)
    assert found["bytes_committed"] == 4 * worker.block_bytes
    feed(worker, "float32", (2, 35, 1, 1), 0)
    token_bytes = sum(layer.num_kv_heads * (layer.key_head_dim + layer.value_head_dim) * 4 for layer in LAYERS)
    assert worker.statistics()["bytes_read"] == 36 * token_bytes
    controls(worker, (RELEASE, 1, 0, 0), (TRUNCATE, 2, 0, 16))
    found = worker.statistics()
    assert (found["blocks_used"], found["blocks_shared"], found["tokens"]) == (1, 0, 16)
    assert found["bytes_committed"] == 4 * worker.block_bytes


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_whole_blocks_are_what_tokens_are(kv_dtype: str) -> None:
    """Whole blocks make the same sequence as tokens, in two pieces, in another order, into blocks that held NaN."""
    first, second = two_layers(kv_dtype), two_layers(kv_dtype)
    for sequence_id, worker in ((7, second), (8, first)):
        feed(worker, kv_dtype, (sequence_id, 0, 3 * 96, 0), 9, spoil=True)
        controls(worker, (RELEASE, sequence_id, 0, 0))
    feed(first, kv_dtype, (1, 0, 96, 0), 0)
    for message, start, count in (("whole blocks", 8, 16), ("whole blocks", 0, 8), ("has 96", 96, 16)):
        with pytest.raises(ValueError, match=message):
            first.export_blocks(1, start, count)
    blocks, before = first.export_blocks(1, 0, 32), state(second)
    assert blocks.nbytes == 32 // first.block_size * first.block_bytes
    for wrong in (blocks[:-1], np.tile(blocks, 2)):
        with pytest.raises(ValueError, match=r"import: data has .* bytes; blocks of 32 tokens take"):
            second.import_blocks(5, 32, wrong)
    assert state(second) == before
    second.import_blocks(5, 32, blocks)
    second.import_blocks(5, 64, first.export_blocks(1, 32, 64), 32)
    assert second.export(5).tobytes() == first.export(1).tobytes()
    want, _ = feed(first, kv_dtype, (1, 96, 30, 1), 5)
    got, _ = feed(second, kv_dtype, (5, 96, 30, 1), 5)
    assert all(map(np.array_equal, want, got)) and second.export(5).tobytes() == first.export(1).tobytes()


@pytest.mark.parametrize("num_threads", [1, 3])
def test_blocks_are_read_from_a_file_into_their_places(num_threads: int, tmp_path: Path) -> None:
    """Blocks read from a file equal imported ones, and each piece has the checksum of its bytes wherever it lies."""
    first, second = (two_layers("float32", num_blocks=16, num_threads=num_threads) for _ in range(2))
    feed(first, "float32", (1, 0, 96, 0), 0)
    feed(second, "float32", (9, 0, 16, 0), 1)
    pieces, start = [(0, 32), (32, 16), (48, 48)], bytes(range(16))
    blocks = [first.export_blocks(1, *piece) for piece in pieces]
    path = tmp_path / "blocks"
    path.write_bytes(b"x" * 5 + b"".join(each.tobytes() for each in reversed(blocks)))
    offsets = [5 + sum(each.nbytes for each in blocks[number + 1 :]) for number in range(3)]
    wanted = [(count, offset, start) for (_, count), offset in zip(pieces, offsets, strict=True)]
    with path.open("rb") as file:
        before = state(second)
        for wrong, message in (
            ([(8, 5, start)], "whole blocks"),
            ([(0, 5, start)], "no tokens"),
            ([(16, -1, start)], "negative file offset"),
            ([(32, 5, start[:4])], "16 bytes"),
            ([(10_000 * 16, 5, start)], "out of blocks"),
        ):
            with pytest.raises(ValueError, match=message):
                second.read_blocks(5, 0, file.fileno(), wrong)
        assert state(second) == before
        got = second.read_blocks(5, 0, file.fileno(), wanted[:2])
        got += second.read_blocks(5, 48, file.fileno(), wanted[2:])
        assert got == [_rworker.checksum(each, start) for each in blocks]
        assert second.export(5).tobytes() == first.export(1).tobytes()
        with pytest.raises(ValueError, match="ends too early"):
            second.read_blocks(6, 0, file.fileno(), [(16, path.stat().st_size - 1, start)])
        assert second.sequence_length(6) == 16
    with pytest.raises(OSError, match="Bad file descriptor"):
        second.read_blocks(7, 0, 1 << 20, wanted[:1])


def test_an_idle_worker_commits_memory_ahead_within_bounds() -> None:
    """Beyond used blocks, half as many as were ever used are committed, or as many as asked for; content stays."""
    worker = two_layers("float32", num_blocks=16)
    worker.commit_ahead()
    feed(worker, "float32", (1, 0, 40, 0), 0)
    before = worker.export(1).tobytes()
    _wait_until_committed(worker, 4)
    worker.commit_ahead(least=5)
    _wait_until_committed(worker, 8)
    worker.begin_step(table([]), [table([(1, 40, 100, 0)])])
    worker.abandon_step()
    assert worker.blocks_touched == 9
    controls(worker, (RELEASE, 1, 0, 0))  # the 9 free blocks have memory
    _wait_until_committed(worker, 9)
    feed(worker, "float32", (2, 0, 40, 0), 0)
    worker.commit_ahead(least=100)
    _wait_until_committed(worker, 16)
    assert worker.export(2).tobytes() == before and worker.blocks_touched == 9
    with pytest.raises(ValueError, match="it must be at least 0"):
        worker.commit_ahead(-1)


def test_no_memory_is_committed_ahead_unasked_or_within_a_step() -> None:
    unasked, asked = two_layers("float32", num_blocks=16), two_layers("float32", num_blocks=16)
    asked.commit_ahead(8)
    for worker in (unasked, asked):
        worker.begin_step(table([]), [table([(1, 0, 200, 0)])])
    touched = asked.statistics()["bytes_committed"]
    time.sleep(0.1)
    for worker in (unasked, asked):
        assert worker.statistics()["bytes_committed"] == touched == 13 * worker.block_bytes
        worker.abandon_step()


def _wait_until_committed(worker: _rworker.RWorker, num_blocks: int) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while worker.statistics()["bytes_committed"] != num_blocks * worker.block_bytes:
        assert time.monotonic() < deadline
        time.sleep(0.005)
