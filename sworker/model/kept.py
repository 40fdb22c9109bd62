"""Layers that keep their weights packed, as a checkpoint has them, and unpack them whenever they compute.

They need no other package and run on every device, but more slowly than a format's own kernels. Such a linear layer has
no attribute ``weight``: code that would read it fails instead of reading packed numbers as a weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastdecode.sworker.model.checkpoints import Packed, Weight
from fastdecode.sworker.model.formats import Layout
from fastdecode.sworker.model.kept_experts import ExpertPart, KeptExperts
from fastdecode.sworker.model.packed_places import PackedPlaces, places_of

NAME = "fastdecode_kept"
"""The name of this quantizer within transformers."""

PREFIX = "packed_"
"""Prefix of a packed tensor's name in its layer, so that no code takes the tensor for a weight."""


class KeptLinear(torch.nn.Module):
    """A linear layer that keeps its weight packed, and unpacks it in every forward."""

    def __init__(self, linear: torch.nn.Linear, layout: Layout, tensors: Mapping[str, torch.Tensor]) -> None:
        """``tensors``: examples, of which only shapes and dtypes are used; loading fills the buffers later."""
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
        return f"in_features={self.in_features}, out_features={self.out_features}, packed"


@register_quantization_config(NAME)
class KeptConfig(QuantizationConfigMixin):
    """A quantization configuration for transformers that says which layers keep their weights packed."""

    def __init__(self, packed: Packed, places: PackedPlaces) -> None:
        self.quant_method = NAME
        self.packed, self.places = packed, places

    def __deepcopy__(self, memo: dict[int, Any]) -> KeptConfig:
        """Return this object itself, since its open files cannot be copied."""
        return self

    def to_dict(self) -> dict[str, Any]:
        return {"quant_method": NAME}


@register_quantizer(NAME)
class KeptQuantizer(HfQuantizer):
    """A quantizer for transformers that replaces linear layers by ``KeptLinear`` before weights are loaded."""

    requires_calibration = False

    def _process_model_before_weight_loading(self, model: torch.nn.Module, **settings: Any) -> None:
        config: KeptConfig = self.quantization_config
        for owner, name in config.places.linears.items():
            parent, _, own = owner.rpartition(".")
            layout = config.packed.layouts[name]
            tensors = {leaf: config.packed.files.read(each) for leaf, each in _leaves(layout).items()}
            linear = getattr(model.get_submodule(parent), own)
            setattr(model.get_submodule(parent), own, KeptLinear(linear, layout, tensors))
        for owner, parameters in config.places.experts.items():
            module = model.get_submodule(owner)
            KeptExperts(module, {own: _parts(config.packed, module, own, names) for own, names in parameters.items()})

    @property
    def is_trainable(self) -> bool:
        """False, since packed weights have no gradient."""
        return False

    def is_serializable(self) -> bool:
        """False, since the checkpoint already has the packed form."""
        return False


def kept_weights(packed: Packed, places: PackedPlaces) -> dict[str, Weight]:
    """Return all tensors of a checkpoint, by their names in the model with layers that keep weights packed."""
    found = packed.plain()
    for owner, name in places.linears.items():
        for leaf, each in _leaves(packed.layouts[name]).items():
            found[f"{owner}.{PREFIX}{leaf}"] = Weight(partial(packed.copied, each))
    for owner, parameters in places.experts.items():
        for own, parts in parameters.items():
            for number, names in enumerate(parts):
                for leaf in _leaves(packed.layouts[names[0]]):
                    stacked = partial(_stacked, packed, names, leaf)
                    found[f"{owner}.{_prefix(own, number)}{leaf}"] = Weight(stacked)
    return found


def places_in(packed: Packed, model: torch.nn.Module) -> PackedPlaces:
    """Return where in ``model`` the packed weights of a checkpoint belong."""
    return places_of(packed.layouts, model)


def why_not_kept(packed: Packed, places: PackedPlaces) -> str:
    """Return why the model cannot keep a checkpoint's weights packed; "" if it can."""
    for parameters in places.experts.values():
        for parts in parameters.values():
            for names in parts:
                leaves = [packed.layouts[name].names.keys() for name in names]
                if any(each != leaves[0] for each in leaves):
                    return f"{names[0]} is packed in other tensors than other experts' weights"
    return places.reason


def _parts(packed: Packed, module: Any, own: str, parts: list[list[str]]) -> list[ExpertPart]:
    """Replace parameter ``own`` by empty buffers for its packed tensors; return the projections joined in ``own``.

    ``parts``: for each projection, the names of its packed weights.
    """
    made = []
    _, rows, columns = module._parameters[own].shape
    for number, names in enumerate(parts):
        layout, prefix = packed.layouts[names[0]], _prefix(own, number)
        for leaf, each in _leaves(layout).items():
            tensor = packed.files.read(each)
            shape = tensor.shape if len(names) == 1 else (len(names), *tensor.shape)
            module.register_buffer(prefix + leaf, torch.empty(shape, dtype=tensor.dtype, device="meta"))
        made.append(ExpertPart(module, layout, prefix, (rows // len(parts), columns)))
    return made


def _stacked(packed: Packed, names: list[str], leaf: str) -> torch.Tensor:
    places = [packed.layouts[name].names[leaf] for name in names]
    if len(places) == 1:
        return packed.copied(places[0])
    return torch.stack([packed.copied(place) for place in places])


def _prefix(own: str, number: int) -> str:
    return f"{PREFIX}{own}_{number}_"


def _leaves(layout: Layout) -> dict[str, str]:
    return {leaf: name for leaf, name in layout.names.items() if leaf != "weight_shape"}
