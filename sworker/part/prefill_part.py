"""A prefill worker's forward of one part of a prompt, whose rows also attend to the keys of earlier parts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from fastdecode.core.remote_prefill import PromptKV
from fastdecode.core.step import Chunk, MiniBatch
from fastdecode.sworker.adapters.calls import DENSE, Calls
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.part.attention import PartAttention
from fastdecode.sworker.run.pipeline import ModelGreenlet
from fastdecode.sworker.run.staging import pack, rows_of, to_numpy

Exchange = Callable[[int, np.ndarray, np.ndarray], PromptKV]
"""A function called at each layer with its number and the part's own k and v, [rows, num_kv_heads, …].

It returns the prompt's keys and values from position 0 to the part's end; in tensor/sequence parallelism, to the
prompt's end. It may wait, and its exceptions end the computation.
"""

Advance = Callable[[int, torch.Tensor], torch.Tensor]
"""A function called at each recurrent layer with its number and payload rows, [rows, 1, elements]; it returns their o.

It may wait for the state after earlier parts, and its exceptions end the computation.
"""


def no_states(layer: int, rows: torch.Tensor) -> torch.Tensor:
    """Raise RuntimeError. Models without recurrent layers pass this as ``compute_part``'s ``advance``."""
    raise RuntimeError(f"layer {layer} is recurrent, and nothing advances its state by {len(rows)} rows")


def compute_part(
    code: ModelCode,
    attention: PartAttention,
    token_ids: Sequence[int],
    start: int,
    samples: bool,
    exchange: Exchange,
    advance: Advance = no_states,
) -> np.ndarray | None:
    """Run tokens ``token_ids``, whose positions begin at ``start``, through a model's code.

    Return the last row's logits, [vocab_size], if ``samples`` is true; else None. Numpy arrays are in the model's
    dtype; 16-bit floats as uint16.
    """
    chunk = Chunk(0, 0, start, token_ids, attends=False, samples=samples, is_decode=False)
    packed = pack(MiniBatch.of([chunk]), code.device)
    layers = itertools.count()

    def attend(
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *_: Any,
        calls: Calls = DENSE,
        **__: Any,
    ) -> torch.Tensor:
        layer = next(layers)
        if not calls.caches_rows:
            own = advance(layer, rows_of(key)[: packed.num_rows])
            return F.pad(own, (0, 0, 0, 0, 0, key.shape[2] - packed.num_rows))[None]
        q, k, v = rows_of(query), rows_of(key)[: packed.num_rows], rows_of(value)[: packed.num_rows]
        gathered = exchange(layer, to_numpy(k.cpu()), to_numpy(v.cpu()))
        own = attention.attend(layer, q[: packed.num_rows], gathered, start)
        return F.pad(own, (0, 0, 0, 0, 0, len(q) - packed.num_rows))[None]

    def run() -> torch.Tensor:
        return code.logits(packed.input_ids, packed.position_ids, packed.logits_rows)[: packed.num_sampled]

    with torch.inference_mode():
        logits = ModelGreenlet(run, attend).switch()
    return to_numpy(logits[-1].cpu()) if samples else None
