"""The layout of a model for R-workers: its layers, and the dtypes of payload and cache."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import msgspec
import numpy as np

from fastdecode.core.dtypes import ITEM_BYTES
from fastdecode.kinds import Layer
from fastdecode.kinds.kind import Way
from fastdecode.kinds.latent import Weights, weight_parts
from fastdecode.kinds.recurrent import Recurrent


@dataclass(frozen=True)
class KVLayout:
    """All that an R-worker must know of a model: its layers, and the dtypes of payload and cache.

    ``isa``: the instruction set that the R-worker must compute with, one of ``ISAS``; "auto" is its fastest.
    ``kv_port``: where the R-worker listens for prefill workers: "" (nowhere), "loopback" (only for its own machine),
    "any" (every interface). ``weights``: by layer number, weights that R-workers multiply with; they are sent
    separately.
    """

    layers: tuple[Layer, ...]
    model_dtype: str
    kv_dtype: str
    isa: str = "auto"
    kv_port: Literal["", "loopback", "any"] = ""
    weights: Mapping[int, Weights] = field(default_factory=dict, compare=False, repr=False)

    def weight_parts(self) -> Iterator[tuple[int, int, np.ndarray]]:
        """Yield (layer number, index of the first head, C-contiguous weight rows of the heads in this piece)."""
        for layer, weights in self.weights.items():
            for first, rows in weight_parts(weights):
                yield layer, first, rows

    @property
    def weight_bytes(self) -> int:
        """Bytes of model weights that an R-worker keeps in addition to its cache, for all layers together."""
        return sum(layer.weight_bytes(ITEM_BYTES[self.model_dtype]) for layer in self.layers)

    @property
    def absorbed(self) -> KVLayout:
        """A copy of the layout for a sender that absorbs queries itself (MLA), as prefill workers do."""
        return replace(self, layers=tuple(layer.absorbed() for layer in self.layers), weights={})

    @property
    def chunk_tokens(self) -> int:
        """A sequence split among R-workers is cut at multiples of this many tokens."""
        return math.lcm(*(layer.chunk_tokens for layer in self.layers))

    @property
    def attends(self) -> bool:
        """True if some layer caches rows; False if all layers are recurrent."""
        return any(layer.caches_rows for layer in self.layers)

    @property
    def kept_apart(self) -> tuple[Recurrent, ...]:
        """The recurrent layers, which keep one state per sequence instead of a row per token."""
        return tuple(layer for layer in self.layers if isinstance(layer, Recurrent))

    @property
    def audited_layers(self) -> list[int]:
        """The numbers of the layers whose rows can be audited."""
        return [number for number, layer in enumerate(self.layers) if layer.is_audited]

    def cannot(self, way: Way) -> str | None:
        """Return why this model does not support the feature ``way``; None if it does.

        The reason is that of one layer, or a reason of all layers together, for instance that none attends.
        """
        own = next((reason for layer in self.layers if (reason := layer.cannot(way))), None)
        return own or self._cannot_together(way)

    def _cannot_together(self, way: Way) -> str | None:
        states = self.kept_apart
        if way == "states" and not states:
            return "no layer of this model is recurrent, so it keeps no states; leave it out"
        if way == "audits" and not self.audited_layers:
            return (
                "no layer of this model has rows that can be audited: its layers are recurrent, see what an index "
                "picks, or are multiplied with weights on R-workers (--latent-absorption s); leave it out"
            )
        if way == "states here" and not self.attends:
            return (
                "no layer of this model attends; with its states at the S-worker, R-workers would have nothing to "
                "keep and nothing to do: give r, auto or nothing"
            )
        if way == "prefill workers" and not self.attends:
            return "no layer of this model attends, and prefill workers share prompts by attention; leave it out"
        if way == "prefill workers" and len({-(-layer.value_head_dim // 16) for layer in states}) > 1:
            return (
                "this model's recurrent layers have heads of several widths, and prefill workers cannot send such "
                "states; leave it out"
            )
        return None

    def cannot_lie_in(self, block_size: int) -> str | None:
        """Return why this model cannot be cached in blocks of ``block_size`` tokens; None if it can."""
        return next((reason for layer in self.layers if (reason := layer.cannot_lie_in(block_size))), None)

    def rewinds(self, num_rows: int) -> bool:
        """Return whether a sequence can drop the last ``num_rows`` tokens of a step, such as rejected draft tokens."""
        return all(layer.rewinds(num_rows) for layer in self.layers)

    def sequence_bytes(self, layer: int) -> int:
        """Return the bytes of a sequence's state in ``layer``, as R-workers store it; 0 without a state."""
        return self.layers[layer].sequence_bytes(self._state_row_bytes)

    @property
    def state_dtype(self) -> str:
        """The dtype of the matrices in recurrent layers' states."""
        return next((layer.dtype for layer in self.kept_apart), "float32")

    def with_state_dtype(self, dtype: str) -> KVLayout:
        """Return a copy of the layout whose state matrices are in ``dtype``, a key of ``WIRE_DTYPE``."""
        return self._with_states(dtype=dtype)

    def keeping(self, num_rows: int) -> KVLayout:
        """Return a copy of the layout whose states can be rolled back after a step of 2 to ``num_rows`` tokens.

        A state's second copy can also be rolled back after a step of one token.
        """
        return self._with_states(kept_rows=num_rows)

    def outliving(self) -> KVLayout:
        """Return a copy of the layout in which decoding sequences' states can be rolled back after each step.

        So the states survive a step that the S-worker does not finish.
        """
        rows = max((layer.kept_rows for layer in self.kept_apart), default=0)
        return self._with_states(kept_rows=max(1, rows), keeps_single=True)

    def _with_states(self, **fields: Any) -> KVLayout:
        layers = (
            msgspec.structs.replace(layer, **fields) if isinstance(layer, Recurrent) else layer for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of K and V, with quantization scales, that one token takes in the cache for all layers together."""
        return sum(layer.token_bytes(self.kv_dtype) for layer in self.layers)

    @property
    def room_bytes_per_token(self) -> int:
        """Bytes of a cache block, divided by its number of tokens.

        If all layers are recurrent, no rows are cached and blocks hold states. Then this is the bytes of one row of a
        state.
        """
        return self.kv_bytes_per_token or self._state_row_bytes

    @property
    def _state_row_bytes(self) -> int:
        return max((layer.state_row_bytes for layer in self.kept_apart), default=0)


def may_cut(layout: KVLayout, is_asked: bool) -> bool:
    """Return whether sequences of a model may be cut into ranges. ``is_asked``: the user has chosen their length.
    Without that choice a model with recurrent layers is not cut, since each of its ranges takes a state.
    """
    return not layout.cannot("ranges") and (is_asked or not layout.kept_apart)
