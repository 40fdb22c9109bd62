"""Mixtures of experts in int8. Rows are grouped by expert, without padding.

The experts' module is not changed: transformers looks up the experts' function by name (see `adapters/experts.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
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
    """Quantize the experts of every module with known weights, one expert after another.

    Experts that were quantized as they were loaded keep their codes (`loading.py`).
    """
    maps, count = FileMaps(), 0
    for module in model.modules():
        if not has_known_form(module):
            continue
        done = module.__dict__.setdefault(EXPERTS, {})
        for part in (each for each in PARTS if each not in done):
            weight = getattr(module, part)
            block = block_of(weight.shape[1 if module.is_transposed else 2], num_heads, part == "down_proj")
            codes: list[IntegerCodes] = []
            done[part] = codes
            # one memory for all transposed weights: a copy of each would leave holes between the codes
            turned = torch.empty(weight.shape[:0:-1], dtype=weight.dtype)
            for each in weight.data:
                codes.append(quantized(turned.copy_(each.T) if module.is_transposed else each, block))
                maps.let_go(each)  # otherwise all experts' pages would stay until the last expert is quantized
            setattr(module, part, PackedWeight.of(weight, unpacker(codes, weight.dtype, bool(module.is_transposed))))
            maps.let_go(weight)
            del weight
        count += 1
    logger.info("experts of %d layers in int8", count)


def unpacker(codes: list[IntegerCodes], dtype: torch.dtype, is_transposed: bool) -> Callable[[], torch.Tensor]:
    """Return a function that returns the weight of all experts, as ``codes`` represent it."""

    def unpack() -> torch.Tensor:
        whole = torch.stack([each.weight(dtype) for each in codes])
        return whole.mT.contiguous() if is_transposed else whole

    return unpack


def has_known_form(module: Any) -> bool:
    """Return whether ``module`` has experts that ``ExpertProducts`` can compute."""
    implementation = getattr(getattr(module, "config", None), "_experts_implementation", None)
    if implementation not in (EXPERTS_NAME, "grouped_mm") or not hasattr(module, "_apply_gate"):
        return False
    weights = [getattr(module, part, None) for part in PARTS]
    is_known = getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", False)
    return is_known and all(isinstance(each, torch.Tensor) and each.ndim == 3 for each in weights)


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
        self.codes = codes  # _packed frees the memory of these codes
        self._products = {part: self._product_of(module, part) for part in PARTS}
        self._activation = "" if module.has_bias else activation_of(module._apply_gate, self._dtype)

    def _product_of(self, module: Any, part: str) -> Any:
        """Pack the experts' codes of ``part``, whose parameter becomes a stand-in; return their common product."""
        product = _sworker.IntegerExperts(_packed(self.codes[part]))
        setattr(module, part, _standing_for(product, self.codes[part], self._dtype, module.is_transposed))
        return product

    def forward(self, experts: Any, rows: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return each row's weighted sum of its experts' outputs, [rows, hidden]. ``index``: int64 [rows, k]."""
        x, k, chosen = as_rows(rows), index.shape[1], index.reshape(-1)
        order = torch.argsort(chosen, stable=True)
        ends = torch.bincount(chosen, minlength=len(self.codes[PARTS[0]])).cumsum(0)
        gates = self._multiplied("gate_up_proj", ends, x[order // k])
        if experts.has_bias:
            gates += experts.gate_up_proj_bias[chosen[order]]
        inner = gates if self._activation else experts._apply_gate(gates.to(rows.dtype)).to(x.dtype).contiguous()
        found = self._multiplied("down_proj", ends, inner, self._activation)
        if experts.has_bias:
            found += experts.down_proj_bias[chosen[order]]
        places = torch.argsort(order).view(index.shape)
        out, threads = torch.empty(len(rows), found.shape[1], dtype=found.dtype), torch.get_num_threads()
        own_weights = weights.to(found.dtype).contiguous()
        _sworker.sum_weighted(array(found), places.numpy(), array(own_weights), array(out), threads)
        return out.to(rows.dtype)

    def _multiplied(self, part: str, ends: torch.Tensor, x: torch.Tensor, activation: str = "") -> torch.Tensor:
        """Return rows times their experts' weights; ``ends``: of each expert's rows in ``x``, int64 [experts]."""
        out = torch.empty(len(x), self._num_columns[part], dtype=x.dtype)
        product, kind, threads = self._products[part], activation or "none", torch.get_num_threads()
        if part == "down_proj" and self._rank:
            self._multiply_with_ranks(self._rank, ends.numpy(), array(x), array(out), kind)
        else:
            product.multiply(array(x), ends.numpy(), array(out), kind, self._isa, threads)
        return out

    def _multiply_with_ranks(self, rank: Ranks, ends: Any, rows: Any, out: Any, kind: str) -> None:
        """Multiply with ranks: each row has one scale for all ranks, and integers are summed over ranks once."""
        peaks, sums = torch.empty(len(rows)), torch.empty(out.shape, dtype=torch.int32)
        product, threads = self._products["down_proj"], torch.get_num_threads()
        product.find_peaks(rows, peaks.numpy(), kind, self._isa, threads)
        peaks = torch.stack(rank.gather(peaks)).amax(0)
        product.add_up(rows, ends, peaks.numpy(), sums.numpy(), kind, self._isa, threads)
        sums = rank.sum(sums)
        product.scale(sums.numpy(), ends, peaks.numpy(), out, self._isa, threads)


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
    threads, packed, freed = torch.get_num_threads(), [], 0
    for each in codes:
        packed.append(_sworker.IntegerWeights(each.codes.numpy(), each.scales.numpy(), None, each.block, threads))
        freed += each.codes.nbytes
        each.codes = each.codes.new_empty((*each.codes.shape,), device="meta")
        if freed >= 1 << 25:  # otherwise a layer's freed codes would stay in memory beside its packed weights
            return_free_memory()
            freed = 0
    return packed


def _standing_for(product: Any, codes: list[IntegerCodes], dtype: torch.dtype, is_transposed: bool) -> PackedWeight:
    """Return a stand-in without memory for the experts' parameter; it unpacks ``product`` if it is read."""

    def unpack() -> torch.Tensor:
        each = zip(product.experts, codes, strict=True)
        found = [IntegerCodes(torch.from_numpy(p.unpack()), c.scales, c.block).weight(dtype) for p, c in each]
        whole = torch.stack(found)
        return whole.mT.contiguous() if is_transposed else whole

    rows, columns = codes[0].codes.shape
    shape = (len(codes), columns, rows) if is_transposed else (len(codes), rows, columns)
    return PackedWeight.of(torch.empty(shape, dtype=dtype, device="meta"), unpack)
