"""Every wrong argument raises an exception that names the argument, and leaves the cache unchanged."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from fastdecode import _rworker
from fastdecode.kinds import Latent, Recurrent

from .harness import FORK, RELEASE, TRUNCATE, Layer, make_worker, random_rows, table

LAYER = Layer(4, 2, 16, 8)


@pytest.fixture
def worker() -> _rworker.RWorker:
    """Return an R-worker whose sequence 1 holds 20 tokens, with 8 blocks of 16."""
    worker = make_worker(LAYER, num_blocks=8)
    worker.begin_step(table([]), [table([(1, 0, 20, 1)])])
    submit(worker, 20)
    worker.wait(0)
    worker.end_step()
    return worker


def arrays(num_rows: int) -> dict[str, np.ndarray]:
    rows = random_rows(np.random.default_rng(0), LAYER, num_rows)
    return {"q": rows.q, "k": rows.k, "v": rows.v, "out": np.empty((num_rows, 4, 8), np.float32)}


def submit(worker: _rworker.RWorker, num_rows: int, **changed: np.ndarray) -> None:
    worker.submit(0, 0, **{**arrays(num_rows), **changed})


BAD_PLANS = {
    "unknown source": ([(FORK, 2, 9, 5)], [], KeyError, "sequence 9 is unknown"),
    "fork onto itself": ([(FORK, 1, 1, 5)], [], ValueError, "sequence 1 exists already"),
    "fork too long": ([(FORK, 2, 1, 21)], [], ValueError, "holds 20 tokens"),
    "fork negative": ([(FORK, 2, 1, -1)], [], ValueError, "num_tokens is -1"),
    "truncate unknown": ([(TRUNCATE, 9, 0, 0)], [], KeyError, "sequence 9 is unknown"),
    "truncate too long": ([(TRUNCATE, 1, 0, 21)], [], ValueError, "holds 20 tokens"),
    "truncate negative": ([(TRUNCATE, 1, 0, -1)], [], ValueError, "num_tokens is -1, but sequence 1 holds 20 tokens"),
    "release unknown": ([(RELEASE, 9, 0, 0)], [], KeyError, "sequence 9 is unknown"),
    "fork of a released one": ([(RELEASE, 1, 0, 0), (FORK, 2, 1, 5)], [], KeyError, "sequence 1 is unknown"),
    "rows of a released one": ([(RELEASE, 1, 0, 0)], [(1, 20, 1, 1)], KeyError, "unknown sequence with context_len 20"),
    "forks out of blocks": ([(FORK, 2 + i, 1, 20) for i in range(7)], [], ValueError, "more than the 8 blocks"),
    "negative rows": ([], [(1, 20, -3, 1)], ValueError, "num_rows is -3; it must be at least 1"),
    "negative context": ([], [(2, -1, 3, 1)], KeyError, "unknown sequence with context_len -1"),
    "double release": ([(RELEASE, 1, 0, 0), (RELEASE, 1, 0, 0)], [], KeyError, "sequence 1 is unknown"),
    "unknown verb": ([(5, 1, 0, 0)], [], ValueError, "verb 5"),
    "unknown sequence": ([], [(9, 5, 1, 1)], KeyError, "unknown sequence with context_len 5"),
    "wrong context": ([], [(1, 19, 1, 1)], ValueError, "context_len is 19, but the cache holds 20"),
    "new id is taken": ([], [(1, 0, 1, 1)], ValueError, "context_len is 0, but the cache holds 20"),
    "no rows": ([], [(1, 20, 0, 1)], ValueError, "num_rows is 0"),
    "twice in a step": ([], [(1, 20, 1, 1), (1, 20, 1, 1)], ValueError, "once in a step"),
    "new one twice": ([], [(2, 0, 1, 1), (2, 0, 1, 1)], ValueError, "once in a step"),
    "order": ([], [(2, 0, 1, 0), (1, 20, 1, 1)], ValueError, "the order read, attend, partial, append"),
    "out of blocks": ([(FORK, 2, 1, 20)], [(1, 20, 60, 1), (2, 20, 60, 1)], ValueError, "bug in the scheduler"),
    "absurd rows": ([], [(1, 20, 2**62, 1)], ValueError, "bug in the scheduler"),
}


@pytest.mark.parametrize("name", BAD_PLANS)
def test_bad_plans_change_nothing(worker: _rworker.RWorker, name: str) -> None:
    controls, spans, error, message = BAD_PLANS[name]
    before = (worker.sequence_ids(), worker.block_table(1), worker.blocks_free, worker.read_tokens(1, 0)[0].tobytes())
    with pytest.raises(error, match=message):
        worker.begin_step(table(controls), [table(spans)])
    after = (worker.sequence_ids(), worker.block_table(1), worker.blocks_free, worker.read_tokens(1, 0)[0].tobytes())
    assert before == after
    worker.begin_step(table([]), [table([(1, 20, 1, 1)])])
    submit(worker, 1)
    worker.wait(0)
    worker.end_step()
    assert worker.sequence_length(1) == 21


@pytest.mark.parametrize("argument", ["q", "k", "v", "out"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda a: a.astype(np.float64),
        lambda a: a.view(np.uint32),
        lambda a: a[:-1],
        lambda a: a[..., :-1],
        lambda a: np.concatenate([a, a], axis=-1)[..., ::2],
        lambda a: np.asfortranarray(a),
        lambda a: np.frombuffer(b"x" + a.tobytes(), a.dtype, offset=1).reshape(a.shape),
        lambda a: a.reshape(len(a), -1),
    ],
)
def test_bad_arrays(worker: _rworker.RWorker, argument: str, spoil: Callable[[np.ndarray], np.ndarray]) -> None:
    worker.begin_step(table([]), [table([(1, 20, 3, 1)])])
    with pytest.raises(ValueError, match=f"^{argument} must be a C-contiguous, aligned float32 array of shape"):
        submit(worker, 3, **{argument: spoil(arrays(3)[argument])})
    submit(worker, 3)
    worker.wait(0)
    worker.end_step()


@pytest.mark.parametrize("spoil", [
    lambda a: a.astype(np.int32),
    lambda a: a.view(np.uint64),
    lambda a: a[:, :3].copy(),
    lambda a: a.reshape(-1),
    lambda a: np.repeat(a, 2, axis=1)[:, ::2],
])  # fmt: skip
def test_bad_tables(worker: _rworker.RWorker, spoil: Callable[[np.ndarray], np.ndarray]) -> None:
    good, before = table([(1, 20, 1, 1), (2, 0, 1, 1)]), worker.statistics()
    with pytest.raises(ValueError, match=r"^controls must be a C-contiguous int64 array of shape \(n, 4\), not "):
        worker.begin_step(spoil(good), [])
    with pytest.raises(ValueError, match=r"^mini_batches\[1\] must be a C-contiguous int64 array of shape \(n, 4\)"):
        worker.begin_step(table([]), [table([]), spoil(good)])
    assert worker.statistics() == before


def test_double_release_in_two_steps(worker: _rworker.RWorker) -> None:
    worker.begin_step(table([(RELEASE, 1, 0, 0)]), [])
    worker.end_step()
    before = worker.statistics()
    with pytest.raises(KeyError, match="sequence 1 is unknown; it was never opened or is released"):
        worker.begin_step(table([(RELEASE, 1, 0, 0)]), [])
    assert worker.statistics() == before and before["blocks_free"] == 8


def test_unknown_sequences_and_layers_are_named(worker: _rworker.RWorker) -> None:
    for call in (worker.sequence_length, worker.block_table, worker.export, lambda i: worker.read_tokens(i, 0)):
        with pytest.raises(KeyError, match="sequence 9 is unknown"):
            call(9)
    for layer in (-1, 1):
        with pytest.raises(ValueError, match=f"layer is {layer}; there are 1"):
            worker.read_tokens(1, layer)


def test_read_only_out(worker: _rworker.RWorker) -> None:
    worker.begin_step(table([]), [table([(1, 20, 1, 1)])])
    out = arrays(1)["out"]
    out.flags.writeable = False
    with pytest.raises(ValueError, match="out is read-only"):
        submit(worker, 1, out=out)


def test_calls_out_of_order(worker: _rworker.RWorker) -> None:
    for call in (lambda: submit(worker, 1), worker.end_step, worker.abandon_step, lambda: worker.wait(0)):
        with pytest.raises(ValueError, match="begin_step"):
            call()
    worker.begin_step(table([]), [table([(1, 20, 1, 1)])])
    with pytest.raises(ValueError, match="still open"):
        worker.begin_step(table([]), [])
    with pytest.raises(ValueError, match="nothing submitted"):
        worker.wait(0)
    with pytest.raises(ValueError, match="nothing submitted"):
        worker.ready(0)
    with pytest.raises(ValueError, match="layer 0 was never submitted"):
        worker.end_step()
    with pytest.raises(ValueError, match="mini_batch is 1; this step has 1"):
        worker.wait(1)
    with pytest.raises(ValueError, match="layer is 1; there are 1"):
        worker.submit(0, 1, **arrays(1))
    submit(worker, 1)
    with pytest.raises(ValueError, match="outstanding"):
        submit(worker, 1)
    with pytest.raises(ValueError, match="outstanding"):
        worker.end_step()
    worker.wait(0)
    with pytest.raises(ValueError, match="submitted before"):
        submit(worker, 1)
    worker.end_step()


BAD_SETTINGS = [
    ({"isa": "mmx"}, "isa is 'mmx'; this machine supports scalar"),
    ({"model_dtype": "int8"}, "model_dtype is 'int8'; it must be float32, float16 or bfloat16"),
    ({"kv_dtype": "fp8"}, "kv_dtype is 'fp8'; it must be float32, float16, bfloat16, int8 or int4"),
    ({"block_size": 48}, "block_size is 48; it must be 16, 32, 64, 128 or 256"),
    ({"num_blocks": 0}, "num_blocks is 0; it must be 1 to 2147483646"),
    ({"num_blocks": 2**31 - 1}, "num_blocks is 2147483647; it must be 1 to 2147483646"),
    ({"num_threads": 0}, "num_threads is 0"),
    ({"cores": [-1]}, "cores has -1"),
    ({"layers": []}, "layers is empty"),
    ({"layers": [Layer(num_heads=3)]}, "multiple of num_kv_heads"),
    ({"layers": [Layer(key_head_dim=0)]}, "head dims must be 1 to 1088, not 0"),
    ({"layers": [Layer(sinks=(1.0,))]}, "sinks must be empty or one per query head"),
    ({"layers": [Layer(alibi_slopes=(1.0,))]}, r"alibi_slopes must be empty or one per query head \(4\), not 1"),
    ({"layers": [Layer(alibi_slopes=(1.0, 0.5, float("nan"), 0.0))]}, "alibi_slopes must be finite, not nan"),
]


STATE = Recurrent(4, 64, 0.1, "delta", 1, 8, 4, 1, silu=True, norm=True, row_elements=1)
LATENT = Latent(4, 1, 64, 64, 0.1)


def changed(layer: Any, **fields: Any) -> SimpleNamespace:
    """Return ``layer``'s fields with some changed; a field that is ... is left out."""
    own = {"kind": layer.kind, **msgspec.structs.asdict(layer), **fields}
    return SimpleNamespace(**{name: value for name, value in own.items() if value is not ...})


BAD_LAYERS = [
    ([4, 2, 64, 64, 0.1], r"^layers\[1\] has no field kind; it must be a layer of fastdecode.kinds$"),
    ((4, 2, 64, 64, 0.1, 0, 0.0, [], []), r"^layers\[1\] has no field kind; it must be a layer of fastdecode.kinds$"),
    (changed(LAYER, kind="sparse"), r"^layers\[1\] is a layer of kind 'sparse', which this build does not know$"),
    (changed(LAYER, kind=7), r"^layers\[1\].kind is 7, which cannot be one$"),
    (changed(LAYER, scale=...), r"^layers\[1\] has no field scale; it must be a layer of fastdecode.kinds$"),
    (changed(LAYER, window="16"), r"^layers\[1\].window is '16', which cannot be one$"),
    (changed(LAYER, sinks=None), r"layers\[1\].sinks is None, which cannot be one"),
    (changed(LATENT, absorption=LAYER), r"^layers\[1\].absorption has no field nope_dim; it must be a layer"),
    (changed(STATE, groups=...), r"^layers\[1\] has no field groups; it must be a layer"),
    (changed(STATE, recurrence="sum"), r"^layers\[1\].recurrence is 'sum'; it must be delta, "),
]


@pytest.mark.parametrize(("layer", "message"), BAD_LAYERS)
def test_a_layer_that_is_none_says_which_field_and_why(layer: Any, message: str) -> None:
    """One sentence names all fields that are missing."""
    with pytest.raises(ValueError, match=message):
        make_worker(LAYER, layers=[LAYER, layer])


@pytest.mark.parametrize(("settings", "message"), BAD_SETTINGS)
def test_bad_settings(settings: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_worker(LAYER, **settings)


def test_a_block_of_no_layers_is_refused() -> None:
    with pytest.raises(ValueError, match="layers is empty; a block needs at least one"):
        _rworker.block_bytes([], "float32", 16)


def test_environment_forces_the_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FASTDECODE_ISA", "scalar")
    assert make_worker(LAYER).isa == "scalar"
    best = _rworker.supported_isas()[-1]
    assert make_worker(LAYER, isa=best).isa == best
    monkeypatch.setenv("FASTDECODE_ISA", "sse9")
    with pytest.raises(ValueError, match="FASTDECODE_ISA is 'sse9'; this machine supports scalar"):
        make_worker(LAYER)


def test_tile_registers_need_the_processor_and_its_system() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    if "RWORKER_EXTENSION" in os.environ or "avx512" not in flags:
        pytest.skip("another build's tile registers are emulated; a CPU without AVX-512 has none")
    wanted = all(flag in flags for flag in ("amx_tile", "amx_bf16", "amx_int8"))
    assert ("avx512_amx" in _rworker.supported_isas()) <= wanted


def test_arrays_live_until_wait(worker: _rworker.RWorker) -> None:
    held = arrays(1)
    counts = {name: sys.getrefcount(array) for name, array in held.items()}
    worker.begin_step(table([]), [table([(1, 20, 1, 1)])])
    worker.submit(0, 0, **held)
    assert all(sys.getrefcount(array) == counts[name] + 1 for name, array in held.items())
    worker.wait(0)
    assert all(sys.getrefcount(array) == counts[name] for name, array in held.items())
    worker.abandon_step()


def test_close_twice_and_with_a_step_open(worker: _rworker.RWorker) -> None:
    worker.begin_step(table([]), [table([(1, 20, 1, 1)])])
    submit(worker, 1)
    worker.close()
    worker.close()
    with pytest.raises(ValueError, match="closed"):
        worker.sequence_ids()
    del worker
    gc.collect()
