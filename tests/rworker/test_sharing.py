"""Sequences that share blocks are read together, with the bits of sequences that have copies."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import FORK, Harness, Layer, Rows, random_rows, table
from .oracle import to_bits

ISAS = _rworker.supported_isas()
DTYPES = ["float32", "float16", "bfloat16"]
LAYERS = {
    "mha": Layer(2, 2, 40, 24, 0.2),
    "gqa": Layer(8, 2, 64, 64),
    "rules": Layer(
        4, 1, 64, 64, 0.2, 700, soft_cap=4.0, sinks=(0.1, -1.0, 3.0, 0.0), alibi_slopes=(0.5, 0.05, 0.005, 0.0)
    ),
    "short window": Layer(4, 2, 32, 32, 0.2, window=20),
}
# (sequence, forked from, tokens kept, tokens of its own): nested, at block borders and not, within a split, unshared.
FORKS = [(1, 0, 1600, 1), (2, 0, 1040, 9), (3, 1, 1100, 600), (4, 2, 512, 3), (5, 0, 511, 70), (6, None, 0, 1200)]
FORKS += [(i, 1, 1600, i % 3 + 1) for i in range(7, 30)]
NEW_ROWS = {0: 1, 1: 1, 2: 5, 3: 1, 4: 70, 5: 1, 6: 2}


@functools.cache
def rows_of(layer: Layer, sequence: int) -> Rows:
    """Return the tokens of its own that a sequence begins with."""
    own = {child: own for child, _, _, own in FORKS}
    return random_rows(np.random.default_rng(sequence), layer, own.get(sequence, 1700))


def new_rows(layer: Layer, sequence: int, step: int) -> Rows:
    num_rows = NEW_ROWS.get(sequence, 1) if step == 0 else 1
    return random_rows(np.random.default_rng(1000 * step + sequence + 100), layer, num_rows)


def part(rows: Rows, begin: int, end: int) -> Rows:
    return Rows(rows.q[begin:end], rows.k[begin:end], rows.v[begin:end])


def history(sequence: int) -> list[tuple[int, int]]:
    """Return (origin, tokens): whose rows a sequence holds, prefix first."""
    parent = {child: (source, kept, own) for child, source, kept, own in FORKS}
    if sequence == 0:
        return [(0, 1700)]
    source, kept, own = parent[sequence]
    pieces, left = [], kept
    for origin, count in history(source) if source is not None else []:
        pieces.append((origin, min(count, left)))
        left -= pieces[-1][1]
    return [piece for piece in [*pieces, (sequence, own)] if piece[1]]


def filled(layer: Layer, chosen: list[int], share: bool, **options: Any) -> Harness:
    """Return a harness with the chosen sequences, forked from each other or each with its own copy."""
    harness = Harness(layer, {"num_blocks": 5000, **options})
    if not share:
        for i in chosen:
            pieces, taken = [], {}
            for origin, count in history(i):
                begin = taken.get(origin, 0)
                pieces.append(part(rows_of(layer, origin), begin, begin + count))
                taken[origin] = begin + count
            whole = Rows(*(np.concatenate([getattr(piece, name) for piece in pieces]) for name in "qkv"))
            harness.step({i: whole}, append_only=(i,))
        return harness
    harness.step({0: part(rows_of(layer, 0), 0, 1700)}, append_only=(0,))
    for child, source, kept, own in FORKS:
        controls = [] if source is None else [(FORK, child, source, kept)]
        harness.lengths[child] = kept
        harness.step({child: part(rows_of(layer, child), 0, own)}, append_only=(child,), controls=controls)
    return harness


def outputs_of(harness: Harness, chosen: list[int]) -> dict[int, np.ndarray]:
    """Return outputs of two steps, some with several rows."""
    outputs = [harness.step({i: new_rows(harness.layer, i, step) for i in chosen}) for step in (0, 1)]
    return {i: np.concatenate([output[i] for output in outputs]) for i in chosen}


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LAYERS)
def test_the_bits_of_separate_copies(name: str, dtype: str, isa: str) -> None:
    layer, all_prompts = LAYERS[name], list(range(30))
    options = {"model_dtype": dtype, "kv_dtype": dtype, "isa": isa}
    chosen = [0, 2, 3, 4, 5, 6, 29]
    want = outputs_of(filled(layer, chosen, share=False, **options), chosen)
    for changed in ({}, {"num_threads": 3, "block_size": 64}):
        got = outputs_of(filled(layer, all_prompts, share=True, **options, **changed), all_prompts)
        for i in chosen:
            np.testing.assert_array_equal(got[i], want[i])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_against_the_oracle(dtype: str, isa: str) -> None:
    layer = LAYERS["rules"]
    harness = filled(layer, [], share=True, model_dtype=dtype, kv_dtype=dtype, isa=isa, num_threads=2, block_size=32)
    rows = {i: random_rows(np.random.default_rng(100 + i), layer, 2) for i in range(30)}
    for i, output in harness.step(rows).items():
        if i % 3 == 0:
            harness.check(i, rows[i].q, output)


def test_a_shared_split_is_read_once() -> None:
    layer, token_bytes = Layer(2, 1, 32, 32), 2 * 32 * 4
    harness = Harness(layer, {})
    harness.step({0: random_rows(np.random.default_rng(0), layer, 1100)}, append_only=(0,))
    worker, count = harness.worker, 200
    controls = table([(FORK, i, 0, 1100 if i % 2 else 600) for i in range(1, count)])
    lengths = [1100 if i % 2 or i == 0 else 600 for i in range(count)]
    worker.begin_step(controls, [table([(i, lengths[i], 1, 1) for i in range(count)])])
    rows = random_rows(np.random.default_rng(1), layer, count)
    worker.submit(0, 0, rows.q, rows.k, rows.v, np.empty_like(rows.q))
    worker.wait(0)
    own = sum(length + 1 - (1024 if length == 1100 else 512) for length in lengths)
    assert worker.end_step()[2] == (1024 + own) * token_bytes


def test_mini_batches_share_each_for_itself() -> None:
    layer = LAYERS["gqa"]
    want = outputs_of(filled(layer, [], share=True), list(range(30)))
    harness = filled(layer, [], share=True, num_threads=2)
    worker, thirds = harness.worker, [list(range(i, 30, 3)) for i in range(3)]
    rows = {i: new_rows(layer, i, 0) for i in range(30)}
    payloads = [Rows(*(np.concatenate([getattr(rows[i], n) for i in third]) for n in "qkv")) for third in thirds]
    outs = [np.empty_like(payload.q) for payload in payloads]
    worker.begin_step(
        table([]), [table([(i, harness.lengths[i], len(rows[i].q), 1) for i in third]) for third in thirds]
    )
    for i, payload in enumerate(payloads):
        worker.submit(i, 0, to_bits(payload.q, "float32"), payload.k, payload.v, outs[i])
    for i, third in enumerate(thirds):
        worker.wait(i)
        first = np.concatenate([want[j][: len(rows[j].q)] for j in third])
        np.testing.assert_array_equal(outs[i], first)
    worker.end_step()
