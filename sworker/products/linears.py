"""A model's linear layers in int8: quantized while it is loaded, and packed after ranks have cut them.

A layer's code is not changed. The layer gets another ``forward``; layers that read the same rows share one product.
"""

from __future__ import annotations

import functools
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from fastdecode import _sworker
from fastdecode.core.errors import ModelLoadError
from fastdecode.core.machine import return_free_memory
from fastdecode.sworker.adapters.index import plan_of_picked_heads
from fastdecode.sworker.adapters.latents import plan_of_latent_heads
from fastdecode.sworker.model.checkpoints import Codes
from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight
from fastdecode.sworker.model.prepack import SharedProduct, multiplies_alone
from fastdecode.sworker.products.codes import (
    NAME,
    IntegerCodes,
    Ranks,
    block_of,
    codes_of,
    quantized,
    set_codes,
    unrotated,
)
from fastdecode.sworker.products.kernels import array, as_rows, integer_isa

logger = logging.getLogger(__name__)


def quantize_linears(
    model: torch.nn.Module, hf_config: Any, published: Mapping[str, Codes], keeps_plain: bool = False
) -> None:
    """Quantize every plain ``nn.Linear`` on the CPU in place; free each weight as soon as it is quantized.

    ``published``: readers of int8 weights in the checkpoint, by name. These are used unchanged, not rotated.
    ``keeps_plain``: keep unquantized weights for a calibration. Weights in mapped files take no memory until then.
    """
    owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    maps, num_heads, cut = FileMaps(), num_attention_heads(hf_config), layers_with_cut_inputs(model)
    kept = expert_counts(hf_config)
    layers = [(name, module) for name, module in model.named_modules() if _is_quantized(name, module, kept)]
    for name, linear in layers:
        weight, own = linear.weight, published.get(f"{name}.weight")
        block = block_of(linear.in_features, num_heads, name in cut)
        codes = IntegerCodes(*own(), 1) if own else quantized(weight, block)
        if keeps_plain and not own:
            codes.plain = weight
        set_codes(linear, codes)
        if owners[id(weight)] == 1:
            linear.weight = _stand_in(weight, codes)
            if not isinstance(weight, PackedWeight):
                maps.let_go(weight)
    num_kept = sum(f"{name}.weight" in published for name, _ in layers)
    logger.info("%d linear layers in int8, %d of them as the checkpoint has them", len(layers), num_kept)


def layers_with_cut_inputs(model: Any) -> set[str]:
    """Return the names of the layers whose inputs ranks split, or would split if there were ranks."""
    plan = dict(getattr(model, "tp_plan", None) or {}) | plan_of_picked_heads(model) | plan_of_latent_heads(model)
    names = (name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear))
    styles = {name: plan.get(name) or plan.get(re.sub(r"\b\d+\b", "*", name)) or "" for name in names}
    return {name for name, style in styles.items() if style.startswith("rowwise")}


def _stand_in(weight: torch.Tensor, codes: IntegerCodes) -> PackedWeight:
    dtype = weight.dtype
    return PackedWeight.of(weight, lambda: codes.weight(dtype))


def _is_quantized(name: str, module: torch.nn.Module, expert_counts: set[int]) -> bool:
    if not isinstance(module, torch.nn.Linear) or module.weight.device.type != "cpu":
        return False
    kind: Any = type(module)
    if not multiplies_alone(kind):
        return False
    # Layers with few outputs, such as routers, need precision and are fast anyway. Sums of more inputs can exceed
    # int32.
    if module.out_features < 16 or module.in_features > 130_000:
        return False
    # a router, recognized by its number of outputs
    if module.out_features in expert_counts and not name.endswith("_proj"):
        return False
    # Parts of names of layers that stay unquantized: they choose experts or tokens, or R-workers use their weights
    kept_names = ("router", "indexer", "kv_b_proj")
    return not any(part in name for part in kept_names)


def expert_counts(hf_config: Any) -> set[int]:
    """Return the numbers of experts that layers of the model have. A linear layer with so many outputs is a router."""
    text_config = hf_config.get_text_config()
    names = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    return {int(getattr(text_config, name, None) or 0) for name in names} - {0}


def num_attention_heads(hf_config: Any) -> int:
    """Return the number of query heads, which are divided among ranks."""
    return int(getattr(hf_config.get_text_config(), "num_attention_heads", 1) or 1)


class IntegerLinears:
    """The packed, quantized linear layers of a model. Their weights cannot be restored."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Pack every layer with an int8 weight. Raise ModelLoadError if the kernels multiply wrongly."""
        self.num_layers = 0
        self._proven: set[tuple[object, ...]] = set()
        self.products: dict[int, IntegerProduct] = {}
        """The product of each layer, by the layer's ``id()``."""
        for linears in list(groups_of(model)):
            self._pack(linears)
            return_free_memory()  # otherwise the freed int8 weights would leave holes between packed weights
        if self.num_layers:
            logger.info("%d linear layers multiply integers", self.num_layers)

    def _pack(self, linears: Sequence[torch.nn.Linear]) -> None:
        codes = [found for linear in linears if (found := codes_of(linear))]
        product = IntegerProduct(linears, codes)
        key = (product.width, product.block, *(len(each.codes) for each in codes))
        if key not in self._proven:
            product.check(torch.cat([each.codes for each in codes]))
            self._proven.add(key)
        for index, linear in enumerate(linears):
            linear.__dict__["forward"] = product.forward_of(index)
            if isinstance(linear.weight, PackedWeight):
                shape, dtype = codes[index].codes.shape, linear.weight.dtype
                like = torch.empty(shape, dtype=dtype, device="meta")
                linear.weight = PackedWeight.of(like, functools.partial(product.weight, index))
            del linear.__dict__[NAME]
            self.products[id(linear)] = product
        self.num_layers += len(linears)


class ProductOfCodes(SharedProduct):
    """A product of int8 weights for layers that read the same rows. Subclasses choose how it is computed."""

    def __init__(self, dtype: torch.dtype, codes: Sequence[IntegerCodes]) -> None:
        """``dtype``: the dtype of the layers' weights. ``codes``: the int8 weight of each layer."""
        self._widths = [len(each.codes) for each in codes]
        self.dtype, self.width, self.num_outputs = dtype, codes[0].codes.shape[1], sum(self._widths)
        self._rows: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def compute(self, rows: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """Return [..., outputs] for ``rows`` [..., inputs].

        With an activation, ``rows`` are the outputs of a gated layer's first product: gates, then values.
        """
        raise NotImplementedError

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        return self.compute(rows)


class IntegerProduct(ProductOfCodes):
    """One integer product for layers that read the same rows."""

    def __init__(self, linears: Sequence[torch.nn.Linear], codes: Sequence[IntegerCodes]) -> None:
        """``codes``: the int8 weight of each of ``linears``, all with the same block size."""
        super().__init__(linears[0].weight.dtype, codes)
        self.block, self._rank = codes[0].block, codes[0].rank
        self._scales = torch.cat([each.scales for each in codes])
        biases = [linear.bias.data.float() for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases) if biases else None
        self._weights = _sworker.IntegerWeights(
            torch.cat([each.codes for each in codes]).numpy(),
            self._scales.numpy(),
            None if self._bias is None else self._bias.numpy(),
            self.block,
            torch.get_num_threads(),
        )
        self._isa = integer_isa()

    @property
    def packed(self) -> _sworker.IntegerWeights:
        """The packed weights of all layers together."""
        return self._weights

    @property
    def isa(self) -> str:
        """The instruction set of the product."""
        return self._isa

    @property
    def is_split(self) -> bool:
        """True if ranks share the product's inputs."""
        return self._rank is not None

    def weight(self, index: int) -> torch.Tensor:
        """See ``SharedProduct.weight``. The weight is computed from int8 numbers and scales."""
        first = sum(self._widths[:index])
        own = slice(first, first + self._widths[index])
        codes = torch.from_numpy(self._weights.unpack())[own]
        return unrotated(codes.float() * self._scales[own, None], self.block).to(self.dtype)

    def compute(self, rows: torch.Tensor, activation: str = "none") -> torch.Tensor:
        """See ``ProductOfCodes.compute``."""
        x = as_rows(rows)
        out = torch.empty(len(x), self.num_outputs, dtype=x.dtype)
        threads = torch.get_num_threads()
        if self._rank is None:
            self._weights.multiply(array(x), array(out), activation, self._isa, threads)
        else:
            self._multiply_with_ranks(self._rank, array(x), array(out), activation, threads)
        return out.view(*rows.shape[:-1], self.num_outputs).to(rows.dtype)

    def _multiply_with_ranks(self, rank: Ranks, x: Any, out: Any, activation: str, threads: int) -> None:
        """Multiply if inputs are split among ranks. All ranks quantize a row with one scale and add integer sums once.

        So the bits are the same as with a single rank.
        """
        peaks, sums = torch.empty(len(x)), torch.empty(out.shape, dtype=torch.int32)
        self._weights.find_peaks(x, peaks.numpy(), activation, self._isa, threads)
        peaks = torch.stack(rank.gather(peaks)).amax(0)
        self._weights.add_up(x, peaks.numpy(), sums.numpy(), activation, self._isa, threads)
        sums = rank.sum(sums)
        self._weights.scale(sums.numpy(), peaks.numpy(), out, self._isa, threads)

    def check(self, codes: torch.Tensor, num_outputs: int = 512) -> None:
        """Raise ModelLoadError unless integer sums of extreme and random rows are exact for the first outputs."""
        rows = torch.randint(-127, 128, (16, self.width), generator=torch.Generator()).float()
        rows[0], rows[1], rows[2, ::2] = 127.0, -127.0, 127.0
        sums = torch.empty(len(rows), self.num_outputs, dtype=torch.int32)
        peaks = torch.empty(len(rows))
        threads = torch.get_num_threads()
        self._weights.find_peaks(rows.numpy(), peaks.numpy(), "none", self._isa, threads)
        self._weights.add_up(rows.numpy(), peaks.numpy(), sums.numpy(), "none", self._isa, threads)
        own = quantized(rows, self.block).codes.double()
        if not torch.equal(own @ codes[:num_outputs].double().T, sums[:, :num_outputs].double()):
            raise ModelLoadError(
                f"quantization: products of {self.width} x {self.num_outputs} integers are wrong with {self._isa}: "
                f"leave --quantization out"
            )


def groups_of(model: torch.nn.Module) -> Iterator[list[torch.nn.Linear]]:
    """Yield every quantized layer, grouped with the layers that read the same rows."""
    seen: set[int] = set()
    # Names of sibling layers that read the same rows, which a shared product quantizes only once
    shared_inputs = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
    for module in model.modules():
        children = dict(module.named_children())
        for names in shared_inputs:
            linears = [children[name] for name in names if name in children]
            if len(linears) == len(names) and _can_share(linears):
                seen.update(map(id, linears))
                yield linears  # type: ignore[misc]
        if codes_of(module) and id(module) not in seen:
            seen.add(id(module))
            yield [module]  # type: ignore[list-item]


def _can_share(linears: Sequence[Any]) -> bool:
    """Return whether these layers can share a product.

    All must be quantized, with equal input and block sizes, unsplit inputs, and either all or no biases.
    """
    codes = [codes_of(linear) for linear in linears]
    kinds = {
        (each.codes.shape[1], each.block, linear.bias is None)
        for each, linear in zip(codes, linears, strict=True)
        if each and each.rank is None
    }
    return all(each and each.rank is None for each in codes) and len(kinds) == 1
