"""The emulated AVX-512 kernels against the real ones, where this CPU has AVX-512: `make emulated`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastdecode import _rworker

from .harness import Harness, Layer, random_rows
from .oracle import to_bits

LAYERS = {
    "gqa8-128": Layer(8, 1, 128, 128),
    "mha40": Layer(2, 2, 40, 24, 0.2),
    "rules": Layer(6, 2, 72, 64, 0.2, window=70, soft_cap=4.0, sinks=tuple(0.1 * i for i in range(6))),
    "alibi": Layer(6, 2, 32, 32, 0.2, alibi_slopes=(0.5, 0.1, 0.02, 0.004, 0.3, 0.0)),
}
KV_DTYPES = ["float32", "float16", "bfloat16", "int8", "int4"]
LENGTHS = [1, 17, 130, 700]
AVX512 = [isa for isa in _rworker.supported_isas() if isa.startswith("avx512")]


def digests(isa: str) -> dict[str, str]:
    """Return digests of what a worker computes and stores, per layer and KV dtype."""
    return {
        f"{name} {kv_dtype}": digest(layer, {"kv_dtype": kv_dtype, "isa": isa, "model_dtype": model_dtype})
        for name, layer in LAYERS.items()
        for kv_dtype in KV_DTYPES
        for model_dtype in [kv_dtype if kv_dtype in ("float16", "bfloat16") else "float32"]
    }


def digest(layer: Layer, options: dict) -> str:
    """Return one number for all answers of two steps, and for the bytes exported after them."""
    found = hashlib.sha256()
    rng, harness = np.random.default_rng(11), Harness(layer, options)
    prompts = {i: random_rows(rng, layer, length) for i, length in enumerate(LENGTHS)}
    prompts[0].k *= np.float32(1e-38)  # The products are subnormal.
    prompts[1].v *= np.float32(1e4)
    harness.step(prompts, append_only=tuple(prompts))
    for num_rows in (1, 5):
        outputs = harness.step({i: random_rows(rng, layer, num_rows) for i in prompts})
        for i in prompts:
            found.update(to_bits(outputs[i], harness.model_dtype).tobytes())
    for i in prompts:
        found.update(harness.worker.export(i).tobytes())
    return found.hexdigest()


@pytest.mark.skipif("RWORKER_EXTENSION" not in os.environ, reason="make emulated builds what this compares")
@pytest.mark.parametrize("isa", AVX512)
def test_the_emulation_computes_what_the_processor_does(isa: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RWORKER_EXTENSION"}
    command = "import json, sys; from rworker.test_emulation import _rworker, digests; isa = sys.argv[1];" + (
        "print(json.dumps(digests(isa) if isa in _rworker.supported_isas() else None))"
    )
    real = subprocess.run(
        [sys.executable, "-c", command, isa],
        cwd=Path(__file__).parents[1],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    want = json.loads(real.stdout)
    if want is None:
        pytest.skip(f"this CPU has no {isa}")
    assert digests(isa) == want
