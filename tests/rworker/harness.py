"""An R-worker with the sequences it holds, for tests: random payloads, steps in one call, and the oracle's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fastdecode import _rworker
from fastdecode.kinds import Dense

from .oracle import attended, attention, from_bits, rounded, to_bits
from .rounding import Roundings

FORK, TRUNCATE, RELEASE = 0, 1, 2


def Layer(
    num_heads: int = 4,
    num_kv_heads: int = 2,
    key_head_dim: int = 64,
    value_head_dim: int = 64,
    scale: float = 0.125,
    *rule: Any,
    **rules: Any,
) -> Dense:
    """Return a layer with small numbers where none are given."""
    return Dense(num_heads, num_kv_heads, key_head_dim, value_head_dim, scale, *rule, **rules)


def table(rows: list[tuple[int, int, int, int]]) -> np.ndarray:
    """Return rows of four integers as an int64 [n, 4] array of controls or spans."""
    return np.array(rows, dtype=np.int64).reshape(-1, 4)


def make_worker(layer: Dense, **options: Any) -> _rworker.RWorker:
    """Return an R-worker of one layer; ``options`` override the defaults."""
    settings: dict[str, Any] = {
        "model_dtype": "float32",
        "kv_dtype": "float32",
        "block_size": 16,
        "num_blocks": 512,
        "num_threads": 1,
    }
    settings.update(options)
    return _rworker.RWorker(layers=list(settings.pop("layers", [layer])), **settings)


@dataclass
class Rows:
    """q, k and v of ``num_rows`` new tokens, float32, token-major."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


def random_rows(rng: np.random.Generator, layer: Dense, num_rows: int) -> Rows:
    """Return Gaussian rows for one layer."""
    return Rows(
        rng.standard_normal((num_rows, layer.num_heads, layer.key_head_dim), dtype=np.float32),
        rng.standard_normal((num_rows, layer.num_kv_heads, layer.key_head_dim), dtype=np.float32),
        rng.standard_normal((num_rows, layer.num_kv_heads, layer.value_head_dim), dtype=np.float32),
    )


@dataclass
class Harness:
    """Feeds rows of one layer to an R-worker and remembers every sequence's keys and values."""

    layer: Dense
    options: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.worker = make_worker(self.layer, **self.options)
        self.model_dtype = self.options.get("model_dtype", "float32")
        self.kv_dtype = self.options.get("kv_dtype", "float32")
        self.lengths: dict[int, int] = {}

    def step(
        self, batch: dict[int, Rows], append_only: tuple[int, ...] = (), controls: Sequence = ()
    ) -> dict[int, np.ndarray]:
        """Run a step of one mini-batch: sequence id -> new rows; return float32 outputs of those that attend."""
        order = [i for i in batch if i not in append_only] + list(append_only)
        spans = [(i, self.lengths.get(i, 0), len(batch[i].k), int(i not in append_only)) for i in order]
        attending = sum(len(batch[i].q) for i in order if i not in append_only)
        q = to_bits(np.concatenate([batch[i].q for i in order])[:attending], self.model_dtype)
        k = to_bits(np.concatenate([batch[i].k for i in order]), self.model_dtype)
        v = to_bits(np.concatenate([batch[i].v for i in order]), self.model_dtype)
        out = np.full((attending, self.layer.num_heads, self.layer.value_head_dim), 7, dtype=q.dtype)
        self.worker.begin_step(table(list(controls)), [table(spans)])
        self.worker.submit(0, 0, q, k, v, out)
        self.worker.wait(0)
        self.worker.end_step()
        results, row = {}, 0
        for sequence_id, context_len, num_rows, attends in spans:
            self.lengths[sequence_id] = context_len + num_rows
            if attends:
                results[sequence_id] = from_bits(out[row : row + num_rows], self.model_dtype).copy()
                row += num_rows
        return results

    def expected(self, sequence_id: int, q: np.ndarray) -> np.ndarray:
        """Return the oracle's output for a sequence's last ``len(q)`` tokens, over what the cache holds."""
        return attention(*self._seen(sequence_id, q), **self._scoring)

    def check(self, sequence_id: int, q: np.ndarray, output: np.ndarray) -> None:
        """Assert that ``output`` of the last ``len(q)`` tokens is as near as roundings allow."""
        group, alibi = self.layer.num_heads // self.layer.num_kv_heads, bool(self.layer.alibi_slopes)
        roundings = Roundings(self.model_dtype, self.kv_dtype, self.worker.isa, group, alibi)
        for at in attended(*self._seen(sequence_id, q), **self._scoring):
            error = np.linalg.norm(output[at.row, at.head] - at.weights @ at.values)
            bound = roundings.bound(at, self.layer.scale)
            assert error <= bound, (
                f"sequence {sequence_id}, row {at.row}, head {at.head}: off by {error:.3e}, roundings by {bound:.3e}"
            )

    def _seen(self, sequence_id: int, q: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Return q as the payload carries it, and the keys and values as the cache holds them."""
        k, v = self.worker.read_tokens(sequence_id, 0)
        return rounded(q, self.model_dtype), k, v

    @property
    def _scoring(self) -> dict[str, Any]:
        rules = ("scale", "window", "soft_cap", "sinks", "alibi_slopes", "chunked")
        return {name: getattr(self.layer, name) for name in rules}
