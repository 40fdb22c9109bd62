"""One forward after loading that proves every layer reaches our attention, and reads off the model's KV layout."""

from __future__ import annotations

from typing import Any

import torch

from fastdecode.errors import UnsupportedModelError
from fastdecode.sworker.lanes import Lane
from fastdecode.sworker.loader import SUPPORTED
from fastdecode.sworker.packing import MIN_ROWS
from fastdecode.sworker.staging import DTYPE_NAME
from fastdecode.types import KVLayout, LayerLayout


def probe_layout(model: torch.nn.Module, hf_config: Any, kv_dtype: str) -> KVLayout:
    """Run MIN_ROWS tokens through ``model`` and return what its attention calls said.

    ``kv_dtype`` "auto" is the model's. UnsupportedModelError when the model does not call us exactly once per
    layer, or asks for something an R-worker does not do.
    """
    probe = _Probe(hf_config.model_type)
    device = next(model.parameters()).device
    tokens = torch.zeros((1, MIN_ROWS), dtype=torch.int64, device=device)
    positions = torch.arange(MIN_ROWS, device=device)[None]
    lane = Lane(lambda: model(input_ids=tokens, position_ids=positions, use_cache=False), probe.record)
    try:
        with torch.inference_mode():
            lane.switch()
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise UnsupportedModelError(f"{hf_config.model_type}: its probe forward failed: {error}") from error
    num_layers = hf_config.get_text_config().num_hidden_layers
    if len(probe.layers) != num_layers:
        raise UnsupportedModelError(
            f"{hf_config.model_type}: {len(probe.layers)} of its {num_layers} layers called the attention interface, "
            f"so their attention cannot be handed to R-workers; supported are {SUPPORTED}"
        )
    model_dtype = DTYPE_NAME[probe.dtype]
    return KVLayout(tuple(probe.layers), model_dtype, model_dtype if kv_dtype == "auto" else kv_dtype)


class _Probe:
    """Answers attention calls with zeros and records their shapes and scoring rules."""

    def __init__(self, model_type: str) -> None:
        self.model_type = model_type
        self.layers: list[LayerLayout] = []
        self.dtype = torch.float32

    def record(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """One layer's call; see :func:`fastdecode.sworker.lanes._attend_in_lane` for shapes."""
        self._refuse_unless(attention_mask is None, "adds a bias to its scores (ALiBi or a mask of its own)")
        self._refuse_unless(kwargs.get("position_bias") is None, "adds a position bias to its scores (ALiBi)")
        self._refuse_unless(getattr(module, "is_causal", True), "attends in both directions")
        self._refuse_unless(query.shape[2] == key.shape[2] == MIN_ROWS, "does not hand over one key per token")
        self.dtype = query.dtype
        self.layers.append(
            LayerLayout(
                num_heads=query.shape[1],
                num_kv_heads=key.shape[1],
                key_head_dim=query.shape[3],
                value_head_dim=value.shape[3],
                scale=query.shape[3] ** -0.5 if scaling is None else float(scaling),
                window=int(sliding_window or 0),
                soft_cap=float(softcap or 0.0),
                sinks=() if s_aux is None else tuple(s_aux.float().tolist()),
            )
        )
        return value.new_zeros((1, MIN_ROWS, query.shape[1], value.shape[3]))

    def _refuse_unless(self, condition: bool, what_it_does: str) -> None:
        if not condition:
            raise UnsupportedModelError(
                f"{self.model_type}: its attention {what_it_does}, which R-workers do not compute; supported are {SUPPORTED}"
            )
