"""Kinds of layers: each is a layout and a message at once, and C++ reads the fields that Python has."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import msgspec
import pytest

from fastdecode import _rworker
from fastdecode.core.dtypes import KV_BITS
from fastdecode.kinds import Absorption, Dense, Index, Latent, Layer, Recurrent
from fastdecode.kinds.layout import KVLayout
from fastdecode.scheduler.sequence import Sizes

WINDOW = Recurrent(2, 16, 1.0, "window", 0, 0, 3, 0, False, False, 32)
SAMPLES: dict[str, Any] = {
    "dense": Dense(4, 2, 16, 16, 0.3, window=9, sinks=(0.5,) * 4),
    "latent": Latent(4, 1, 24, 16, 0.3, absorption=Absorption(8, 12)),
    "index": Index(3, 16, 0.5, picks=4),
    "recurrent": WINDOW,
}


def test_there_is_a_sample_of_each_kind() -> None:
    assert {each.kind for each in get_args(Layer)} == set(SAMPLES)


@pytest.mark.parametrize("layer", SAMPLES.values(), ids=SAMPLES)
def test_a_layer_is_its_own_message(layer: Any) -> None:
    message = msgspec.json.encode(layer)
    assert msgspec.json.decode(message, type=Layer) == layer
    told = msgspec.json.decode(message)
    for wrong in ({**told, "kind": "unknown"}, {**told, "num_heads": 0}, {**told, "scale": "1"}, {**told, "more": 1}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, Layer)


@pytest.mark.parametrize("layer", SAMPLES.values(), ids=SAMPLES)
def test_cpp_reads_every_field(layer: Any) -> None:
    """A field that C++ did not read would have no effect there."""
    told = {"kind": layer.kind, **msgspec.structs.asdict(layer)}
    for name in told:
        lacking = SimpleNamespace(**{each: value for each, value in told.items() if each != name})
        if name == "row_elements":  # C++ computes this field, and checks the payload against it.
            continue
        with pytest.raises(ValueError, match=f"has no field {name}; it must be a layer of fastdecode.kinds"):
            _rworker.block_bytes([lacking], "float32", 16)  # type: ignore[list-item]


@pytest.mark.parametrize("kv_dtype", KV_BITS)
@pytest.mark.parametrize("kind", ["dense", "latent", "index"])
def test_both_sides_count_the_same_bytes(kind: str, kv_dtype: str) -> None:
    """Blocks are whole cache lines, so long blocks show the bytes of a token."""
    layer, tokens = SAMPLES[kind], 256
    told = _rworker.block_bytes([layer], kv_dtype, tokens)
    assert layer.token_bytes(kv_dtype) * tokens <= told < layer.token_bytes(kv_dtype) * tokens * 2


def test_a_state_takes_what_cpp_gives_it() -> None:
    layout = KVLayout((SAMPLES["dense"], WINDOW), "float32", "float32")
    blocks = _rworker.state_blocks(list(layout.layers), "float32", 16)
    block_bytes = _rworker.block_bytes(list(layout.layers), "float32", 16)
    assert (blocks - 1) * block_bytes < layout.sequence_bytes(1) <= blocks * block_bytes
    assert layout.sequence_bytes(0) == 0


def test_a_model_cannot_do_what_one_of_its_layers_cannot() -> None:
    dense, states = (KVLayout(layers, "float32", "float32") for layers in ((SAMPLES["dense"],), (WINDOW,)))
    assert dense.cannot("ranges") is None and dense.rewinds(100)
    assert states.cannot("ranges") is None
    assert "this model keeps a state" in (states.cannot("states in ranges, parking") or "")
    assert "no layer of this model is recurrent" in (dense.cannot("states") or "")
    assert "no layer of this model attends" in (states.cannot("states here") or "")
    assert [states.keeping(3).rewinds(rows) for rows in (3, 4)] == [True, False]
    blocks = KVLayout((Index(3, 16, 1.0, picks=2, pick_block=64, pick_local=1),), "float32", "float32")
    assert blocks.cannot_lie_in(32) is None and "128 must divide that" in (blocks.cannot_lie_in(128) or "")


def test_sizes_count_what_is_beside_tokens() -> None:
    plain, stateful = Sizes(16), Sizes(16, fixed=3, worth_blocks=7)
    assert [plain.blocks_for(each) for each in (0, 1, 16, 17)] == [0, 1, 1, 2]
    assert [stateful.blocks_for(each) for each in (1, 17)] == [4, 5]
    assert (plain.blocks_of_copy(32), plain.blocks_of_copy(33), stateful.blocks_of_copy(33)) == (0, 1, 4)
    assert (plain.rewinds, stateful.rewinds, plain.worth, stateful.worth) == (True, False, 0, 7)
