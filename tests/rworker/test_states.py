"""States of recurrent layers equal an oracle's, whatever the cuts, the threads and the instruction set."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from fastdecode import _rworker
from fastdecode.cluster.r_worker.host import make_layer_cache
from fastdecode.core.dtypes import from_wire, to_wire
from fastdecode.core.types import Verb
from fastdecode.kinds import Recurrent
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.part.states import PartStates

from .harness import FORK, RELEASE, TRUNCATE, Layer, table

DELTA, SCAN, WINDOW, SELECTIVE, LRU = range(5)
RECURRENCES = ("delta", "scan", "window", "selective", "lru")
ATTENTION = Layer(num_heads=2, num_kv_heads=1, key_head_dim=16, value_head_dim=16)
NUM_TOKENS = 23


@dataclass(frozen=True)
class Kind:
    """A recurrent layer with random weights."""

    kind: int = DELTA
    heads: int = 4
    groups: int = 2
    key_dim: int = 24
    value_dim: int = 40
    taps: int = 4
    decays: int = 1
    silu: bool = True
    norm: bool = True
    has_bias: bool = False
    has_skip: bool = False
    kept_rows: int = 0
    keeps_single: bool = False
    has_convolution: bool = True
    dtype: str = "float32"

    @property
    def channels(self) -> int:
        return self.heads * self.value_dim + 2 * self.groups * self.key_dim

    @property
    def scale(self) -> float:
        return self.key_dim**-0.5 if self.kind == DELTA else 1.0

    def weights(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Return filters, bias, skip and factors."""
        rng = np.random.default_rng(7)
        out = self.heads * self.value_dim
        filters, bias, skip, factors = (rng.standard_normal(n).astype(np.float32) for n in
                               (self.taps * self.channels, self.channels, self.heads, self.key_dim * out))  # fmt: skip
        filters = filters if self.has_convolution else np.ones_like(filters)
        return filters, bias * self.has_bias, skip * self.has_skip, -np.abs(factors) * (self.kind == SELECTIVE)

    def layout(self) -> Recurrent:
        filters, bias, skip, factors = (each.tobytes() for each in self.weights())
        return Recurrent(
            self.heads, self.value_dim, self.scale, RECURRENCES[self.kind], self.groups, self.key_dim, self.taps,
            self.decays, self.silu, self.norm, row_elements=0, filters=filters * self.has_convolution,
            bias=bias * self.has_bias, skip=skip * self.has_skip, factors=factors * (self.kind == SELECTIVE),
            kept_rows=self.kept_rows, keeps_single=self.keeps_single, dtype=self.dtype,
        )  # fmt: skip

    def rounded(self, state: np.ndarray) -> np.ndarray:
        """Return ``state`` as it is kept after a token."""
        return state if self.dtype == "float32" else from_wire(to_wire(state, self.dtype), self.dtype)

    def rows(self, dtype: str, num_tokens: int = NUM_TOKENS, seed: int = 1) -> tuple[np.ndarray, ...]:
        """Return payload rows and what they encode: channels, decays (logs) and rates."""
        rng = np.random.default_rng(seed)
        channels = to_wire(rng.standard_normal((num_tokens, self.channels)), dtype)
        if self.kind == WINDOW:
            none = np.zeros((num_tokens, 0), np.float32)
            return channels[:, None], from_wire(channels, dtype), none, none
        if self.kind in (SELECTIVE, LRU):  # The last dims are steps or decays.
            steps = rng.uniform(0.05, 0.95, (num_tokens, self.heads, self.value_dim)).astype(np.float32)
            rows = np.concatenate([channels, steps.reshape(num_tokens, -1).view(channels.dtype)], 1)
            return rows[:, None], from_wire(channels, dtype), steps, steps[:, :, 0]
        decays = -rng.exponential(0.2, (num_tokens, self.heads, self.decays)).astype(np.float32)
        rates = rng.uniform(0.1, 1.0, (num_tokens, self.heads)).astype(np.float32)
        numbers = np.concatenate([decays.reshape(num_tokens, -1), rates], 1).view(channels.dtype)
        rows = np.concatenate([channels, numbers], 1)
        return rows[:, None], from_wire(channels, dtype), decays, rates


KINDS = {
    "delta": Kind(),
    "per channel": Kind(groups=4, decays=24),
    "scan": Kind(SCAN, groups=1, key_dim=48, value_dim=16, norm=False, has_bias=True, has_skip=True),
    "wide": Kind(groups=4, key_dim=128, value_dim=128),
    "window": Kind(WINDOW, groups=0, key_dim=0, value_dim=32, taps=3, silu=False, norm=False, has_bias=True),
    "selective": Kind(SELECTIVE, groups=1, taps=1, silu=False, norm=False, has_convolution=False),
    "lru": Kind(LRU, groups=0, key_dim=1, silu=False, norm=False),
}
KINDS |= {
    "delta in bfloat16": replace(KINDS["delta"], dtype="bfloat16"),
    "scan in float16": replace(KINDS["scan"], dtype="float16"),
    "selective in bfloat16": replace(KINDS["selective"], dtype="bfloat16"),
    "lru in float16": replace(KINDS["lru"], dtype="float16"),
}


def oracle(kind: Layer, channels: np.ndarray, decays: np.ndarray, rates: np.ndarray) -> np.ndarray:
    """Return o [tokens, heads, value_dim], in float64."""
    filters, bias, skip, factors = (each.astype(np.float64) for each in kind.weights())
    padded = np.concatenate([np.zeros((kind.taps - 1, kind.channels)), channels])
    taps = filters.reshape(kind.taps, -1)
    x = sum(padded[tap : tap + len(channels)] * taps[tap] for tap in range(kind.taps)) + bias
    x = x / (1 + np.exp(-x)) if kind.silu else x
    wide, out = kind.groups * kind.key_dim, kind.heads * kind.value_dim
    if kind.kind == WINDOW:
        return x.reshape(len(x), kind.heads, -1)
    if kind.kind == LRU:
        found = np.zeros((1, kind.heads, kind.value_dim))
        for now, decay in zip(x, decays.astype(np.float64), strict=True):
            found = np.concatenate([found, (decay * kind.rounded(found[-1]) + now.reshape(kind.heads, -1))[None]])
        return found[1:]
    q, k, v = (x[:, :wide], x[:, wide : 2 * wide], x[:, 2 * wide :]) if kind.kind == DELTA else (
        x[:, out + wide :], x[:, out : out + wide], x[:, :out])  # fmt: skip
    q, k = (each.reshape(len(x), kind.groups, -1).repeat(kind.heads // kind.groups, 1) for each in (q, k))
    if kind.norm:
        q, k = (each / np.sqrt((each * each).sum(-1, keepdims=True) + 1e-6) for each in (q, k))
    v = v.reshape(len(x), kind.heads, -1)
    state, found = np.zeros((kind.heads, kind.key_dim, kind.value_dim)), []
    for t in range(len(x)):
        logs, rate = decays[t].astype(np.float64)[:, :, None], rates[t][:, None]
        if kind.kind == SELECTIVE:
            rate = decays[t]
            logs = factors.reshape(kind.key_dim, kind.heads, -1).transpose(1, 0, 2) * rate[:, None]
        state = state * np.exp(logs)
        d = v[t] - (np.einsum("hkv,hk->hv", state, k[t]) if kind.kind == DELTA else 0)
        state = state + k[t][:, :, None] * (rate * d)[:, None]
        found.append(np.einsum("hkv,hk->hv", state, q[t]) * kind.scale + skip[:, None] * v[t])
        state = kind.rounded(state)
    return np.stack(found)


class Harness:
    """An R-worker with one layer that attends and one that is recurrent."""

    def __init__(self, kind: Layer, **settings: Any) -> None:
        self.kind = kind
        settings = {"model_dtype": "float32", "block_size": 16, "num_blocks": 1000, "num_threads": 1} | settings
        self.dtype = settings["model_dtype"]
        self.worker = _rworker.RWorker(layers=[ATTENTION, kind.layout()], kv_dtype=self.dtype, **settings)

    def step(
        self,
        spans: list[tuple[int, int, np.ndarray]],
        controls: list[tuple[int, int, int, int]] = (),
        end: bool = True,
        appended: list[tuple[int, int, np.ndarray]] = (),
        mode: int = 1,
    ) -> np.ndarray:
        """Run a step; return o of the recurrent layer.

        ``spans`` are (sequence, tokens before, payload rows), and ``appended`` the same for second copies. ``mode``: of
        ``spans``, 2 for later segments of at most one split.
        """
        rows = np.concatenate([rows for *_, rows in (*spans, *appended)])
        planned = [(i, before, len(r), how) for how, some in ((mode, spans), (0, appended)) for i, before, r in some]
        self.worker.begin_step(table(list(controls)), [table(planned)])
        item, num_outputs = rows.dtype, sum(len(each) for *_, each in spans)
        q, k = np.zeros((num_outputs, 2, 16), item), np.zeros((len(rows), 1, 16), item)
        partials = np.empty((num_outputs, 2, 18), np.float32)
        self.worker.run(0, 0, q, k, k, *((q.copy(),) if mode == 1 else (q[:0].copy(), partials)))
        none = np.zeros((len(rows), 1, 0), item)
        out = np.empty((num_outputs, self.kind.heads, self.kind.value_dim), item)
        self.worker.run(0, 1, none[:num_outputs], np.ascontiguousarray(rows), none, out)
        self.worker.end_step() if end else self.worker.abandon_step()
        return out

    def cut(self, rows: np.ndarray, cuts: tuple[int, ...], sequence: int = 1) -> np.ndarray:
        """Send the same rows in several steps."""
        starts = (0, *cuts)
        return np.concatenate(
            [self.step([(sequence, a, rows[a:b])]) for a, b in zip(starts, (*cuts, len(rows)), strict=True)]
        )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", KINDS)
def test_outputs_are_the_oracles_whatever_the_cuts_and_the_company(name: str, dtype: str) -> None:
    """Whole, token by token, or beside others on two threads, the output and the state have the same bits."""
    kind = KINDS[name]
    rows, *said = kind.rows(dtype)
    for isa in _rworker.supported_isas()[:3]:
        whole = Harness(kind, model_dtype=dtype, isa=isa)
        found = whole.cut(rows, ())
        near = max(2e-5 if dtype == "float32" else 1e-2, 0 if kind.dtype == "float32" else 5e-3)
        wanted = oracle(kind, *said)
        assert np.abs(from_wire(found, dtype) - wanted).max() < near * np.abs(wanted).max(), isa
        cut = Harness(kind, model_dtype=dtype, isa=isa, num_threads=2)
        assert np.array_equal(cut.cut(rows, (1, 2, 3, 9, 10)), found)
        other = kind.rows(dtype, 7, seed=2)[0]
        assert np.array_equal(cut.step([(3, 0, other), (2, 0, rows)])[7:], found)
        states = [whole.worker.export(1), cut.worker.export(1), cut.worker.export(2)]
        assert np.array_equal(states[0], states[1]) and np.array_equal(states[0], states[2])


@pytest.mark.parametrize("name", KINDS)
def test_prompts_of_several_batches_have_the_bits_of_single_tokens(name: str) -> None:
    """Tokens advance a state in batches of 32, and heads of many sequences in pairs, without changing a bit."""
    kind = KINDS[name]
    rows, *said = kind.rows("float32", 70)
    for isa in _rworker.supported_isas()[:3]:
        whole = Harness(kind, isa=isa, num_blocks=4000)
        found = whole.step([(sequence, 0, rows) for sequence in range(9)]).reshape(9, 70, kind.heads, -1)
        single, threads = (Harness(kind, isa=isa, num_threads=count) for count in (1, 2))
        assert np.array_equal(single.cut(rows, tuple(range(1, 70))), found[0])
        assert np.array_equal(threads.cut(rows, (31, 65)), found[0])
        states = [each.worker.export(sequence) for each, sequence in ((whole, 8), (single, 1), (threads, 1))]
        assert np.array_equal(found, found[:1].repeat(9, 0))
        assert np.array_equal(states[0], states[1]) and np.array_equal(states[0], states[2])
    near = 5e-5 if kind.dtype == "float32" else 2e-2
    wanted = oracle(kind, *said)
    assert np.abs(found[0] - wanted).max() < near * np.abs(wanted).max()


def test_states_are_counted_forked_moved_and_released() -> None:
    """A fork and an export go on with the bits of the sequence they come from, and nothing stays behind."""
    kind = KINDS["delta"]
    rows = kind.rows("float32")[0]
    wanted = Harness(kind).cut(rows, ())
    here, there = Harness(kind), Harness(kind, block_size=32)
    blocks = here.worker.state_blocks
    assert blocks > 0
    here.step([(1, 0, rows[:18])])
    assert here.worker.num_blocks - here.worker.blocks_free == blocks + 2
    forked = here.step([(5, 18, rows[18:20]), (1, 18, rows[18:19])], [(FORK, 5, 1, 18)])
    assert np.array_equal(forked, wanted[[18, 19, 18]])
    assert here.worker.num_blocks - here.worker.blocks_free == 2 * blocks + 3, "the first full block is shared"
    there.worker.import_(9, 16, here.worker.export(5, 0, 16))
    with pytest.raises(ValueError, match="its state was written"):
        there.step([(9, 16, rows[16:17])])
    there.worker.begin_step(table([(RELEASE, 9, 0, 0)]), [table([])])
    there.worker.end_step()
    there.worker.import_(9, 20, here.worker.export(5))
    assert np.array_equal(there.step([(9, 20, rows[20:])]), wanted[20:])
    for each in (here, there):
        each.worker.begin_step(table([(RELEASE, i, 0, 0) for i in each.worker.sequence_ids()]), [table([])])
        each.worker.end_step()
        assert each.worker.blocks_free == each.worker.num_blocks


@pytest.mark.parametrize("name", KINDS)
def test_a_later_segment_goes_on_from_the_state_of_the_one_before(name: str) -> None:
    """The bits are those of one segment; a segment moves; one that gets no rows, or whose step fails, is dropped."""
    kind = replace(KINDS[name], kept_rows=2)
    rows = kind.rows("float32")[0]
    wanted = Harness(kind).cut(rows, ())
    first, second, third = Harness(kind), Harness(kind, num_threads=2), Harness(kind)
    first.step([(1, 0, rows[:16])])
    first.step([(1, 16, rows[16:18])])  # the state still lacks these two
    state = first.worker.export(1, 18, 0)
    for has_rows in (False, True):
        second.worker.import_(2, 0, state, 18)
        second.step([(2, 0, rows[18:])], end=False, mode=2) if has_rows else second.step([(3, 0, rows)])
        assert 2 not in second.worker.sequence_ids()
    second.worker.import_(2, 0, state, 18)
    assert np.array_equal(second.step([(2, 0, rows[18:20])], mode=2), wanted[18:20])
    assert np.array_equal(second.step([(2, 1, rows[19:21])], [(TRUNCATE, 2, 0, 1)], mode=2), wanted[19:21])
    third.worker.import_(2, 3, second.worker.export(2))
    assert np.array_equal(third.step([(2, 3, rows[21:])], mode=2), wanted[21:])
    with pytest.raises(ValueError, match="a state in this cache takes"):
        third.worker.import_(4, 0, state[:-4], 18)
    moved = second.worker.export(2)
    moved[-8:].view(np.int64)[0] = -1  # the number of tokens before the segment, which ends a moved segment's bytes
    for num_tokens, data, start in ((0, state, (1 << 40) + 1), (3, moved, 0)):
        with pytest.raises(ValueError, match="tokens before its segment; at most"):
            third.worker.import_(4, num_tokens, data, start)
    assert third.worker.sequence_ids() == [2]


def test_a_state_is_of_all_tokens_and_only_of_steps_that_ended() -> None:
    """A state cannot be cut; an abandoned step spoils it, and then only a release is possible."""
    kind = KINDS["delta"]
    rows = kind.rows("float32")[0]
    harness = Harness(kind)
    harness.step([(1, 0, rows[:18])])
    for control in ((TRUNCATE, 1, 0, 16), (FORK, 2, 1, 16)):
        with pytest.raises(ValueError, match=r"has a state, which covers (all its|its first 18) tokens"):
            harness.worker.begin_step(table([control]), [table([])])
    harness.step([(1, 18, rows[18:19]), (2, 0, rows)], end=False)
    with pytest.raises(ValueError, match="its state was written by a step that was abandoned"):
        harness.step([(1, 18, rows[18:19])])
    found = harness.step([(1, 0, rows[:18]), (2, 0, rows)], [(RELEASE, 1, 0, 0)])
    whole = Harness(kind).cut(rows, ())
    assert np.array_equal(found, np.concatenate([whole[:18], whole]))


@pytest.mark.parametrize("name", KINDS)
def test_a_second_copy_follows_and_goes_back_behind_the_rows_of_a_step(name: str) -> None:
    """A second copy gets rows in chunks, singly, and wrong ones taken back; then it attends with the same bits."""
    kind = replace(KINDS[name], kept_rows=2)
    rows, wrong = kind.rows("float32")[0], kind.rows("float32", seed=5)[0]
    wanted = Harness(kind).cut(rows, ())
    home, copy = Harness(kind), Harness(kind, num_threads=2)
    for start, end in ((0, 9), (9, 10), (10, 11), (11, 13)):
        found = home.step([(1, start, rows[start:end])])
        beside = copy.step([(2, start, rows[start:end])], appended=[(1, start, rows[start:end])])
        assert np.array_equal(found, wanted[start:end]) and np.array_equal(beside, found)
    for num_wrong, end in ((1, 14), (2, 16)):
        length = 13 if num_wrong == 1 else 14
        copy.step([], appended=[(1, length, wrong[:num_wrong])])
        copy.step([], [(TRUNCATE, 1, 0, length)], appended=[(1, length, rows[length:end])])
    assert np.array_equal(copy.step([(1, 16, rows[16:17])]), wanted[16:17])
    for start in range(13, 17):
        home.step([(1, start, rows[start : start + 1])])
    assert np.array_equal(home.worker.export(1), copy.worker.export(1))
    with pytest.raises(ValueError, match="has a state, which covers its first 17 tokens"):
        copy.worker.begin_step(table([(TRUNCATE, 1, 0, 16)]), [table([])])


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("num_written", [0, 1, 2])
def test_a_step_that_was_not_ended_leaves_the_states_of_sequences_that_decode(name: str, num_written: int) -> None:
    """An abandoned step harms no state, whether none, one or both recurrent layers had taken its row.

    A step that was ended is taken back behind its row.
    """
    kind = replace(KINDS[name], kept_rows=1, keeps_single=True)
    rows, wrong = kind.rows("float32")[0], kind.rows("float32", seed=5)[0]
    layout = kind.layout()
    worker = _rworker.RWorker(
        layers=[layout, ATTENTION, layout], model_dtype="float32", kv_dtype="float32", block_size=16, num_blocks=1000,
        num_threads=1,
    )  # fmt: skip

    def step(rows: np.ndarray, start: int, num_layers: int = 3, cut: tuple[int, ...] = ()) -> list[np.ndarray]:
        controls = [(TRUNCATE, 1, 0, *cut)] if cut else []
        worker.begin_step(table(controls), [table([(1, start, len(rows), 1)])])
        q, k = np.zeros((len(rows), 2, 16), np.float32), np.zeros((len(rows), 1, 16), np.float32)
        none, out = np.zeros((len(rows), 1, 0), np.float32), np.empty((len(rows), kind.heads, kind.value_dim), "f4")
        found = []
        for layer in range(num_layers):
            payload = (q, k, k, np.empty_like(q)) if layer == 1 else (none, np.ascontiguousarray(rows), none, out)
            worker.run(0, layer, *payload)
            found.append(payload[-1].copy())
        worker.end_step() if num_layers == 3 else worker.abandon_step()
        return found

    wanted = Harness(KINDS[name]).cut(rows, ())
    step(rows[:9], 0)
    assert (worker.sequence_length(1), worker.least_length(1)) == (9, 9)
    step(rows[9:10], 9)
    assert (worker.sequence_length(1), worker.least_length(1)) == (10, 9)
    step(wrong[:1], 10, num_layers=num_written)
    assert (worker.sequence_length(1), worker.least_length(1)) == (10, 10 if num_written else 9)
    step(wrong[:1], 10)
    first, _, last = step(rows[10:11], 10, cut=(10,))
    assert np.array_equal(first, wanted[10:11]) and np.array_equal(last, wanted[10:11])
    step(rows[11:], 11, num_layers=num_written)
    assert worker.least_length(1) == (11 + 1 if num_written else 10)


@pytest.mark.parametrize("name", KINDS)
def test_prefill_workers_advance_states_from_part_to_part(name: str) -> None:
    """After three parts an R-worker stores the last part's state and goes on with the same bits."""
    kind, cuts = KINDS[name], (0, 1, 13, 22)
    rows = kind.rows("float32")[0]
    wanted, layout = Harness(kind).cut(rows, ()), KVLayout((ATTENTION, kind.layout()), "float32", "float32")
    part, state = PartStates(layout, partial(make_layer_cache, num_tokens=64, num_threads=1, cores=())), None
    for start, end in pairwise(cuts):
        o, state = part.advance(1, torch.from_numpy(rows[start:end]), state, start)
        assert np.array_equal(o.numpy(), wanted[start:end])
    part.close()
    assert state is not None and len(state) == layout.sequence_bytes(1) and layout.sequence_bytes(0) == 0
    there, k = Harness(kind), np.zeros((22, 1, 16), np.float32)
    there.worker.begin_step(table([(Verb.RESERVE, 1, 7, 22)]), [table([])])
    there.worker.end_step()
    with pytest.raises(ValueError, match=f"has {len(state)} bytes, not {len(state) - 4}"):
        there.worker.store_state(7, 1, state[4:])
    with pytest.raises(ValueError, match="layer 0 has 0 bytes"):
        there.worker.store_state(7, 0, state)
    there.worker.store(7, 0, 0, k, k)
    there.worker.store_state(7, 1, state)
    with pytest.raises(ValueError, match="came before"):
        there.worker.store_state(7, 1, state)
    assert np.array_equal(there.step([(1, 22, rows[22:])], [(Verb.COMMIT, 1, 7, 22)]), wanted[22:])
    with pytest.raises(ValueError, match="prefill workers send that of a prompt from its first token"):
        there.worker.begin_step(table([(Verb.RESERVE, 1, 8, 40)]), [table([])])
    there.worker.begin_step(table([(RELEASE, 1, 0, 0)]), [table([])])
    there.worker.end_step()
    assert there.worker.blocks_free == there.worker.num_blocks


@pytest.mark.parametrize("name", ["delta in bfloat16", "per channel", "scan", "scan in float16", "wide"])
@pytest.mark.parametrize("keeps_single", [False, True])
def test_single_rows_after_drafts_prompts_and_each_other_have_the_same_bits(name: str, keeps_single: bool) -> None:
    """Steps of 1 to 4 rows, the last of which may be taken back, follow each other with the same bits.

    A state's matrix then lacks no row, one or several.
    """
    kind = replace(KINDS[name], kept_rows=3, keeps_single=keeps_single)
    rows, wrong = kind.rows("float32", 60)[0], kind.rows("float32", 60, seed=5)[0]
    wanted, rng = Harness(kind).cut(rows, ()), np.random.default_rng(3)
    for isa in _rworker.supported_isas()[:3]:
        harness, others = Harness(kind, isa=isa, num_threads=2), Harness(KINDS[name], isa=isa)
        same = others.cut(rows, ())
        done, controls = 0, []
        while done < 60:
            num_rows = min(int(rng.choice([1, 1, 1, 2, 3, 4])), 60 - done)
            num_wrong = int(rng.integers(0, num_rows)) if 1 < num_rows <= 3 else 0
            right = num_rows - num_wrong
            given = np.concatenate([rows[done : done + right], wrong[:num_wrong]])
            found = harness.step([(1, done, given)], controls)
            assert np.array_equal(found[:right], same[done : done + right])
            done += right
            controls = [(TRUNCATE, 1, 0, done)] if num_wrong else []
        assert np.abs(same - wanted).max() <= (1e-3 if kind.dtype == "float32" else 5e-2) * np.abs(wanted).max()
        harness.step([(2, 0, rows)], controls)
        assert np.array_equal(harness.worker.export(1), others.worker.export(1))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": 3}, "groups must divide heads"),
        ({"decays": 5}, "decays must be 1"),
        ({"taps": 17}, "taps"),
        ({"kind": LRU}, "0 and 1 for an lru"),
        ({"has_convolution": False}, "none for one tap"),
    ],
)
def test_numbers_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Harness(Kind(**change))
