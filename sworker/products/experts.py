"""Mixtures of experts in int8. Rows are grouped by expert, without padding.

The experts' module is not changed: transformers looks up the experts' function by name (see `adapters/experts.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from fastdecode import _sworker
from fastdecode.core.machine import return_free_memory
from fastdecode.sworker.adapters.experts import EXPERTS_NAME, experts_forward
from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight
from fastdecode.sworker.products.codes import EXPERTS, IntegerCodes, Ranks, block_of, quantized
from fastdecode.sworker.products.kernels import activation_of, array, as_rows, integer_isa

logger = logging.getLogger(__name__)

PRODUCTS = "expert_products"
"""The attribute of an experts' module that holds its :class:`ExpertProducts`."""

PARTS = ("gate_up_proj", "down_proj")
"""Parameters of experts: [experts, outputs, inputs], or [experts, inputs, outputs] if ``is_transposed``."""


def quantize_experts(model: torch.nn.Module, num_heads: int) -> None:
    """Quantize the experts of every module that holds experts in a known form, one expert at a time."""
    maps, count = FileMaps(), 0
    for module in _known_experts(model):
        module.__dict__[EXPERTS] = {}
        for part in PARTS:
            weight = getattr(module, part)
            block = block_of(weight.shape[1 if module.is_transposed else 2], num_heads, part == "down_proj")
            codes = [quantized(each.T if module.is_transposed else each, block) for each in weight.data]
            module.__dict__[EXPERTS][part] = codes
            setattr(module, part, PackedWeight.of(weight, _unpacker(codes, weight.dtype, module.is_transposed)))
            maps.let_go(weight)
            del weight
        count += 1
    logger.info("experts of %d layers in int8", count)


def _unpacker(codes: list[IntegerCodes], dtype: torch.dtype, is_transposed: bool) -> Callable[[], torch.Tensor]:
    def unpack() -> torch.Tensor:
        whole = torch.stack([each.weight(dtype) for each in codes])
        return whole.mT.contiguous() if is_transposed else whole

    return unpack


def _known_experts(model: torch.nn.Module) -> Iterator[Any]:
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "_experts_implementation", None) != EXPERTS_NAME or not hasattr(module, "_apply_gate"):
            continue
        weights = [getattr(module, part, None) for part in PARTS]
        is_known = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
        if is_known and all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in weights):
            yield module


def pack_experts(model: torch.nn.Module) -> int:
    """Pack the codes of all experts in ``model``; return the number of layers with experts."""
    count = 0
    for module in model.modules():
        codes = module.__dict__.pop(EXPERTS, None)
        if codes:
            if not count:
                ALL_EXPERTS_FUNCTIONS.register(f"{EXPERTS_NAME}_int8", integer_experts_forward)
            module.__dict__[PRODUCTS] = ExpertProducts(module, codes)
            config: Any = module.config
            config._experts_implementation = f"{EXPERTS_NAME}_int8"
            count += 1
            return_free_memory()
    return count


class ExpertProducts:
    """The packed experts of one layer."""

    def __init__(self, module: Any, codes: dict[str, list[IntegerCodes]]) -> None:
        """``codes``: by parameter, the int8 weight of each expert, which is freed when the expert is packed."""
        self._isa, self._dtype = integer_isa(), module.gate_up_proj.dtype
        self._rank = codes["down_proj"][0].rank
        self._num_columns = {part: len(each[0].codes) for part, each in codes.items()}
        self.codes = codes  # before `_packed` frees the codes
        self._gates, self._downs = (_packed(codes[part]) for part in PARTS)
        for part, packed in zip(PARTS, (self._gates, self._downs), strict=True):
            own = _standing_for(packed, codes[part], self._dtype, module.is_transposed)
            setattr(module, part, own)
        self._activation = "" if module.has_bias else activation_of(module._apply_gate, self._dtype)

    def forward(self, experts: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each row's weighted sum of its experts' outputs, [rows, hidden]. ``index``: int64 [rows, k]."""
        x, k, chosen = as_rows(rows), index.shape[1], index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        ends = torch.bincount(chosen, minlength=len(self._gates)).cumsum(0).tolist()
        groups = [(e, slice(a, b)) for e, (a, b) in enumerate(zip([0, *ends], ends, strict=False)) if a < b]
        gates = self._multiplied(self._gates, groups, x[order // k], self._num_columns["gate_up_proj"])
        if experts.has_bias:
            gates += experts.gate_up_proj_bias[chosen[order]]
        inner = gates if self._activation else experts._apply_gate(gates.to(rows.dtype)).to(x.dtype).contiguous()
        found = self._multiplied(self._downs, groups, inner, self._num_columns["down_proj"], self._activation)
        if experts.has_bias:
            found += experts.down_proj_bias[chosen[order]]
        in_order = torch.empty_like(found)
        in_order[order] = found * weights.reshape(-1)[order, None].to(found.dtype)
        return _sum_in_order(in_order.view(len(rows), k, found.shape[1])).to(rows.dtype)

    def _multiplied(
        self, packed: list[Any], groups: list[tuple[int, slice]], x: torch.Tensor, columns: int, activation: str = ""
    ) -> torch.Tensor:
        """Return the rows of each group multiplied by its expert's weights. ``groups``: (expert, its rows in ``x``)."""
        out = torch.empty(len(x), columns, dtype=x.dtype)
        rows, kind, threads = array(x), activation or "none", torch.get_num_threads()
        if packed is self._downs and self._rank:
            self._multiply_with_ranks(self._rank, groups, rows, array(out), kind)
            return out
        results = array(out)
        for expert, own in groups:
            packed[expert].multiply(rows[own], results[own], kind, self._isa, threads)
        return out

    def _multiply_with_ranks(
        self, rank: Ranks, groups: list[tuple[int, slice]], rows: Any, out: Any, kind: str
    ) -> None:
        """Multiply if inputs are split among ranks. All ranks use one scale per row, and add their integer sums."""
        peaks, sums = torch.empty(len(rows)), torch.empty(out.shape, dtype=torch.int32)
        threads = torch.get_num_threads()
        for expert, own in groups:
            self._downs[expert].find_peaks(rows[own], peaks.numpy()[own], kind, self._isa, threads)
        peaks = torch.stack(rank.gather(peaks)).amax(0)
        for expert, own in groups:
            self._downs[expert].add_up(rows[own], peaks.numpy()[own], sums.numpy()[own], kind, self._isa, threads)
        sums = rank.sum(sums)
        for expert, own in groups:
            self._downs[expert].scale(sums.numpy()[own], peaks.numpy()[own], out[own], self._isa, threads)


def integer_experts_forward(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Compute quantized experts; see ``ExpertProducts.forward``. transformers calls this by its registered name."""
    products = experts.__dict__.get(PRODUCTS)
    compute = products.forward if products else experts_forward
    found: torch.Tensor = compute(experts, hidden_states, top_k_index, top_k_weights)
    return found


def _packed(codes: list[IntegerCodes]) -> list[Any]:
    """Pack each expert's codes for the kernels, and free the unpacked codes at once."""
    threads, packed = torch.get_num_threads(), []
    for each in codes:
        packed.append(_sworker.IntegerWeights(each.codes.numpy(), each.scales.numpy(), None, each.block, threads))
        each.codes = each.codes.new_empty((*each.codes.shape,), device="meta")
    return packed


def _standing_for(
    packed: list[Any], codes: list[IntegerCodes], dtype: torch.dtype, is_transposed: bool
) -> PackedWeight:
    """Return a parameter without memory in place of the experts'; reading its values unpacks ``packed``."""

    def unpack() -> torch.Tensor:
        each = zip(packed, codes, strict=True)
        found = [IntegerCodes(torch.from_numpy(p.unpack()), c.scales, c.block).weight(dtype) for p, c in each]
        whole = torch.stack(found)
        return whole.mT.contiguous() if is_transposed else whole

    rows, columns = codes[0].codes.shape
    shape = (len(codes), columns, rows) if is_transposed else (len(codes), rows, columns)
    return PackedWeight.of(torch.empty(shape, dtype=dtype, device="meta"), unpack)


def _sum_in_order(parts: torch.Tensor) -> torch.Tensor:
    """Return the float32 sum over dim 1, added in order, so that a row's bits do not depend on other rows."""
    total = parts[:, 0].float()
    for index in range(1, parts.shape[1]):
        total = total + parts[:, index].float()
    return total
