"""Quantizes experts while transformers loads them, so that plain weights of experts are never joined in memory.

transformers would stack all experts of a layer in the model's dtype, layer after layer, and only then hand them over.
Here each expert's mapped tensors become int8 codes, and their pages are given back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from transformers.core_model_loading import Concatenate, ConversionOps, MergeModulelist, WeightConverter
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight, Sample
from fastdecode.sworker.products.codes import EXPERTS, block_of, quantized
from fastdecode.sworker.products.experts import PARTS, has_known_form, unpacker
from fastdecode.sworker.products.linears import num_attention_heads


class ExpertsConfig(QuantizationConfigMixin):
    """Makes ``from_pretrained`` quantize experts to int8 codes as it reads them."""

    name = "fastdecode_int8_experts"
    """The name of the quantizer within transformers."""

    def __init__(self) -> None:
        self.quant_method = self.name


register_quantization_config(ExpertsConfig.name)(ExpertsConfig)


@register_quantizer(ExpertsConfig.name)
class ExpertsQuantizer(HfQuantizer):
    """Replaces the operations that join experts' weights by one that quantizes each expert."""

    requires_calibration = False

    def update_weight_conversions(self, weight_conversions: list[Any], model: torch.nn.Module) -> list[Any]:
        """Return ``weight_conversions`` with experts quantized in place of joined."""
        return [_quantizing(each) for each in weight_conversions]

    @property
    def is_trainable(self) -> bool:
        """False, since codes have no gradient."""
        return False

    def is_serializable(self) -> bool:
        """False, since the checkpoint has the plain weights."""
        return False


def _quantizing(converter: Any) -> Any:
    """Return ``converter`` with ``QuantizeExperts`` as its operation if it joins experts, else as it is."""
    if not isinstance(converter, WeightConverter) or len(converter.target_patterns) != 1:
        return converter
    done = [(type(step), getattr(step, "dim", None)) for step in converter.operations]
    if done not in ([(MergeModulelist, 0)], [(MergeModulelist, 0), (Concatenate, 1)]):
        return converter
    own = [QuantizeExperts(converter.operations)]
    return converter.copy(converter._original_source_patterns, converter._original_target_patterns, operations=own)


class QuantizeExperts(ConversionOps):
    """Quantizes the experts of one parameter; joins them as transformers does if the module is of unknown form."""

    def __init__(self, operations: Sequence[ConversionOps]) -> None:
        """``operations``: transformers' own, which join the experts."""
        self._operations = operations

    @torch.no_grad()
    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        full_layer_name: str = "",
        model: Any = None,
        **more: Any,
    ) -> dict[str, Any]:
        """Return the parameter by ``target_patterns``: a stand-in without memory if its codes were made."""
        owner, _, part = full_layer_name.rpartition(".")
        module = model.get_submodule(owner)
        projections = [input_dict[pattern] for pattern in source_patterns if pattern in input_dict]
        if part in PARTS and _can_quantize(module, projections):
            return {target_patterns[0]: _quantized_part(module, part, projections, num_attention_heads(model.config))}
        for operation in self._operations:
            input_dict = operation.convert(
                input_dict,
                source_patterns=source_patterns,
                target_patterns=target_patterns,
                full_layer_name=full_layer_name,
                model=model,
                **more,
            )
        return input_dict


def _can_quantize(module: Any, projections: Sequence[Any]) -> bool:
    """Return whether each of ``projections`` is one matrix [outputs, inputs] for each expert of ``module``."""
    counts = {len(each) if isinstance(each, list) else 0 for each in projections}
    if len(counts) != 1 or 0 in counts or not has_known_form(module) or module.is_transposed:
        return False
    shapes = {tuple(expert.shape[1:]) for each in projections for expert in each}
    return len(shapes) == 1 and all(expert.ndim == 2 for each in projections for expert in each)


def _quantized_part(module: Any, part: str, projections: list[list[torch.Tensor]], num_heads: int) -> PackedWeight:
    """Attach the codes of parameter ``part`` to ``module``; return a stand-in for the parameter."""
    maps, codes, samples = FileMaps(), [], []
    first = [each[0] for each in projections]
    outputs, inputs = sum(len(each) for each in first), first[0].shape[1]
    whole = torch.empty(len(projections[0]), outputs, inputs, dtype=first[0].dtype, device="meta")
    sample, block = Sample(whole.numel()), block_of(inputs, num_heads, part == "down_proj")
    for tensors in zip(*projections, strict=True):
        weight = tensors[0] if len(tensors) == 1 else torch.cat(tensors)
        codes.append(quantized(weight, block))
        samples.append(sample.of(weight))
        for each in tensors:
            maps.let_go(each)
    module.__dict__.setdefault(EXPERTS, {})[part] = codes
    stand_in = PackedWeight.of(whole, unpacker(codes, whole.dtype, False))
    stand_in.sample = torch.cat(samples)
    return stand_in
