"""Linear layers that keep their weight packed, as a checkpoint has it, and unpack it whenever they compute.

They need no package of the format's own and run on every device; a format's own kernels are faster. Such a layer has
no attribute ``weight``: code that would read it fails instead of reading packed numbers as a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastdecode.sworker.model.checkpoints import Packed, Weight
from fastdecode.sworker.model.formats import Layout
from fastdecode.sworker.model.prepack import multiplies_alone

NAME = "fastdecode_kept"
"""The name of this quantizer within transformers."""

PREFIX = "packed_"
"""Prefix of a packed tensor's name in its layer, so that no code takes the tensor for a weight."""


class KeptLinear(torch.nn.Module):
    """A linear layer that keeps its weight packed, and unpacks it in every forward."""

    def __init__(self, linear: torch.nn.Linear, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: give only the buffers' shapes and dtypes; loading fills the buffers later."""
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self._layout = layout
        self._shape = torch.tensor([linear.out_features, linear.in_features], device="cpu")
        for leaf, tensor in tensors.items():
            self.register_buffer(PREFIX + leaf, torch.empty_like(tensor, device="meta"))
        self.bias = linear.bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Unpack the weight; return ``rows`` […, in_features] times it: […, out_features]."""
        return F.linear(rows, self.unpacked(rows.dtype), self.bias)

    def unpacked(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the unpacked weight, [out_features, in_features]."""
        tensors = {name.removeprefix(PREFIX): tensor for name, tensor in self._buffers.items() if tensor is not None}
        return self._layout.unpack(tensors | {"weight_shape": self._shape}, dtype)

    def extra_repr(self) -> str:
        """Return the layer's sizes as ``nn.Linear`` prints them."""
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


@register_quantization_config(NAME)
class KeptConfig(QuantizationConfigMixin):
    """Names the layers that keep their weights packed, for transformers' loading."""

    def __init__(self, packed: Packed) -> None:
        self.quant_method = NAME
        self.packed = packed

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptConfig:
        """Return this object itself, since its open files cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return the settings that can be written as JSON."""
        return {"quant_method": NAME}


@register_quantizer(NAME)
class KeptQuantizer(HfQuantizer):
    """Replaces linear layers by ``KeptLinear`` before transformers loads their weights."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **_: Any) -> None:
        packed = self.quantization_config.packed
        for name, layout in packed.layouts.items():
            parent, _, own = name.removesuffix(".weight").rpartition(".")
            owner = model.get_submodule(parent)
            tensors = {leaf: packed.files.read(each) for leaf, each in _leaves(layout).items()}
            setattr(owner, own, KeptLinear(getattr(owner, own), layout, tensors))

    @property
    def is_trainable(self) -> bool:
        """False, since packed weights have no gradient."""
        return False

    def is_serializable(self) -> bool:
        """False, since the checkpoint already has the packed form."""
        return False


def kept_weights(packed: Packed) -> dict[str, Weight]:
    """Return all tensors of a checkpoint, by their names in the model with ``KeptLinear`` layers."""
    found = packed.plain()
    for name, layout in packed.layouts.items():
        stem = name.removesuffix(".weight")
        for leaf, each in _leaves(layout).items():
            found[f"{stem}.{PREFIX}{leaf}"] = Weight(lambda each=each: packed.copied(each))  # type: ignore[misc]
    return found


def why_not_kept(packed: Packed, model: torch.nn.Module) -> str:
    """Return the reason why ``model`` cannot keep a checkpoint's weights packed; "" if it can."""
    modules = dict(model.named_modules())
    for name, layout in packed.layouts.items():
        module = modules.get(name.removesuffix(".weight"))
        kind: Any = type(module)
        if not layout.is_linear or not isinstance(module, torch.nn.Linear) or not multiplies_alone(kind):
            return f"{name} is no plain linear layer's (experts, or a layer that the model names otherwise)"
    return ""


def _leaves(layout: Layout) -> dict[str, str]:
    """Return the names of a packed weight's tensors that its layer keeps: all but ``weight_shape``."""
    return {leaf: name for leaf, name in layout.names.items() if leaf != "weight_shape"}
