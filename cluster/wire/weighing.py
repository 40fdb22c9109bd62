"""Encodes, decodes and checks the frames WEIGH and WEIGHED."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

import numpy as np

from fastdecode.core.dtypes import WIRE_DTYPE
from fastdecode.core.errors import FrameError
from fastdecode.core.weighing import WeighedPart, Weighing
from fastdecode.kinds.attending import Attending
from fastdecode.kinds.kind import MAX_LAYERS
from fastdecode.kinds.layout import KVLayout

HEAD = struct.Struct("<qqqqqB")
"""The first part of WEIGH: sequence id, query position, offset, number of tokens, block length, ``finds_norms``."""

MOST_NUMBER_BYTES = HEAD.size + 8 * MAX_LAYERS
MOST_BLOCKS = 1 << 24


def encode_weighing(asked: Weighing) -> list[bytes | np.ndarray]:
    """Return the parts of WEIGH: numbers and layers; the layers' queries, one after the other; and norms, if any."""
    part, layers = asked.part, np.array(asked.layers, "<i8")
    head = part.sequence_id, part.position, part.offset, part.num_tokens, asked.block, asked.finds_norms
    queries = np.concatenate([each.reshape(-1) for each in asked.queries])
    parts: list[bytes | np.ndarray] = [HEAD.pack(*head) + layers.tobytes(), queries]
    return parts if asked.norms is None else [*parts, np.ascontiguousarray(asked.norms, np.float32)]


def decode_numbers(data: bytes | bytearray, layout: KVLayout) -> Weighing:
    """Return the question in WEIGH's first part, without arrays. Raise FrameError for impossible values."""
    max_position = 1 << 40
    num_layers, rest = divmod(len(data) - HEAD.size, 8)
    if num_layers < 1 or rest:
        raise FrameError(f"WEIGH: {len(data)} bytes of numbers, not {HEAD.size} and 8 for each layer")
    sequence_id, position, offset, num_tokens, block, finds_norms = HEAD.unpack_from(data)
    if finds_norms > 1:
        raise FrameError(f"WEIGH: whether norms are wanted must be 0 or 1, not {finds_norms}")
    layers = tuple(np.frombuffer(data, "<i8", num_layers, HEAD.size).tolist())
    if layers != tuple(sorted(set(layers))) or not 0 <= layers[0] <= layers[-1] < len(layout.layers):
        raise FrameError(f"WEIGH: layers must ascend, from 0 to {len(layout.layers) - 1}")
    if not all(layout.layers[layer].caches_rows for layer in layers):
        raise FrameError("WEIGH: a layer that is recurrent attends to no token")
    if not any(isinstance(layout.layers[layer], Attending) for layer in layers):
        raise FrameError("WEIGH: none of the layers attends")
    if not 0 <= position <= max_position or not 0 <= offset <= max_position:
        raise FrameError(f"WEIGH: position and offset must be 0 to {max_position:,}")
    if not 1 <= num_tokens <= position + 1 or not 1 <= block <= max_position:
        raise FrameError("WEIGH: a query must see at least 1 token, and none after its own; blocks have at least 1")
    part = WeighedPart(0, sequence_id, position, offset, num_tokens)
    asked = Weighing(part, block, layers, (), None, finds_norms == 1)
    if asked.num_blocks > MOST_BLOCKS:
        raise FrameError(f"WEIGH: {asked.num_blocks:,} blocks; {MOST_BLOCKS:,} at most")
    return asked


def num_query_bytes(layout: KVLayout, layers: Sequence[int]) -> int:
    """Return the bytes of one row's queries in ``layers``."""
    elements = sum(math.prod(layout.layers[layer].row_shapes[0]) for layer in layers)
    return elements * WIRE_DTYPE[layout.model_dtype].itemsize


def queries_of(layout: KVLayout, layers: Sequence[int], memory: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return the queries of ``layers`` as views of ``memory``, uint8: [1, num_heads, query_dim] each."""
    shapes = [(1, *layout.layers[layer].row_shapes[0]) for layer in layers]
    pieces = np.split(memory.view(WIRE_DTYPE[layout.model_dtype]), np.cumsum(list(map(math.prod, shapes)))[:-1])
    return tuple(piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True))


def num_heads_of(layout: KVLayout, layers: Sequence[int]) -> int:
    """Return the number of query heads, summed over those of ``layers`` that attend."""
    chosen = (layout.layers[layer] for layer in layers)
    return sum(layer.num_heads for layer in chosen if isinstance(layer, Attending))


def answer_shape(layout: KVLayout, asked: Weighing) -> tuple[int, ...]:
    """Return the shape of the float32 answer to ``asked``: weights per block, or norms per head."""
    return (1, num_heads_of(layout, asked.layers), 2) if asked.finds_norms else (asked.num_blocks,)


def checked_answer(found: np.ndarray, asked: Weighing) -> np.ndarray:
    """Return ``found``, the answer. Raise FrameError for impossible weights or sums.
    NaN and an infinite max are accepted: a sound R-worker returns them if the model overflows.
    """
    if asked.finds_norms:
        if (found[..., 1] < 0).any():
            raise FrameError("WEIGHED: a sum is negative")
    elif (found < 0).any() or found.sum(dtype=np.float64) > 1.001:
        raise FrameError("WEIGHED: weights must not be negative, and at most 1 together")
    return found
