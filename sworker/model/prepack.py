"""Linear layers with weights packed once, where torch would pack them at every call (CPU only).

The model's code is not changed. Each ``nn.Linear`` gets its own ``forward``, and layers that read the same rows (q, k
and v) share one product. The original weights are freed: see :class:`PackedWeight`.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F

from fastdecode.sworker.model.packed_weight import FileMaps, PackedWeight

logger = logging.getLogger(__name__)

PROOF_ROWS = 16
"""Number of random rows on which a packed product is compared with torch's own product."""

PROOF_OUTPUTS = 512
"""Most columns of the product that are compared: torch packs all columns it reads, and LM heads are large."""


class PackedLinears:
    """The linear layers of a model whose weights are packed for fast products; ``undo`` restores them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Pack every plain ``nn.Linear`` on the CPU whose packed product equals torch's, and none on other devices."""
        self.num_layers = 0
        self.num_shared = 0
        self._undo: list[Callable[[], None]] = []
        self._proofs: dict[tuple[object, ...], bool] = {}
        self._owners = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
        self._maps = FileMaps()
        if torch.backends.mkldnn.is_available():
            for linears in list(_groups(model)):
                self._pack(linears)
        logger.info("%d linear layers packed, %d of them in shared products", self.num_layers, self.num_shared)

    def undo(self) -> None:
        while self._undo:
            self._undo.pop()()
        self.num_layers = self.num_shared = 0

    def _pack(self, linears: list[torch.nn.Linear]) -> None:
        product = SharedProduct(linears)
        if not self._proves_equal(product, linears):
            logger.info("%s is left as it is: its packed product differs from torch's own", linears[0])
            return
        for index, linear in enumerate(linears):
            linear.__dict__["forward"] = product.forward_of(index)
            self._undo.append(lambda linear=linear: linear.__dict__.pop("forward"))  # type: ignore[misc]
            if self._owners[id(linear.weight)] == 1:
                self._release(linear, product, index)
        self.num_layers += len(linears)
        self.num_shared += len(linears) if len(linears) > 1 else 0

    def _proves_equal(self, product: SharedProduct, linears: list[torch.nn.Linear]) -> bool:
        """Return whether ``product`` gives the same outputs as torch for ``linears``.

        The result is reused for layers of the same shapes and dtype, since these determine the rounding.
        """
        first = linears[0]
        key = (first.weight.dtype, first.in_features, *(linear.out_features for linear in linears))
        if key not in self._proofs:
            rows = torch.randn(1, PROOF_ROWS, first.in_features, generator=torch.Generator()).to(first.weight.dtype)
            self._proofs[key] = all(
                equal_within_rounding(
                    product.forward_of(index)(rows)[..., :PROOF_OUTPUTS], _first_outputs(linear, rows)
                )
                for index, linear in enumerate(linears)
            )
        return self._proofs[key]

    def _release(self, linear: torch.nn.Linear, product: SharedProduct, index: int) -> None:
        """Replace the weight of ``linear``, number ``index`` in ``product``, by a ``PackedWeight``; free its memory."""
        weight = linear.weight
        linear.weight = PackedWeight.of(weight, lambda: product.weight(index))
        self._maps.let_go(weight)

        def restore() -> None:
            linear.weight = torch.nn.Parameter(product.weight(index), requires_grad=False)

        self._undo.append(restore)


class SharedProduct:
    """One packed product for layers that read the same rows. The layer that is called first computes it for all."""

    def __init__(self, linears: list[torch.nn.Linear]) -> None:
        """Pack the weights in the layers' dtype, or in float32 if this CPU multiplies no other dtype fast."""
        self._own_dtype = linears[0].weight.dtype
        self._dtype = self._own_dtype if has_fast_products(self._own_dtype) else torch.float32
        self._widths = [linear.out_features for linear in linears]
        weights = [linear.weight.data for linear in linears]
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        # Number of rows for which the packed layout is best; with other numbers, products are at most 3 per cent slower
        rows_hint = 64
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.to(self._dtype).contiguous(), rows_hint)
        biases = [linear.bias.data for linear in linears if linear.bias is not None]
        self._bias = torch.cat(biases).to(self._dtype) if biases else None
        self._rows: torch.Tensor | None = None
        self._parts: dict[int, torch.Tensor] = {}

    def forward_of(self, index: int) -> Callable[[torch.Tensor], torch.Tensor]:
        """Return layer ``index``'s forward: [..., in_features] to [..., out_features], in the dtype of the input."""
        return self._compute if len(self._widths) == 1 else lambda rows: self._part(index, rows)

    def weight(self, index: int) -> torch.Tensor:
        """Return a copy of layer ``index``'s original weight, [out_features, in_features]."""
        dense = self._packed.to_dense().to(self._own_dtype)
        return dense if len(self._widths) == 1 else dense.split(self._widths)[index].clone()

    def _part(self, index: int, rows: torch.Tensor) -> torch.Tensor:
        """Return layer ``index``'s columns of the product, as a view. The last layer's call frees the product."""
        if rows is not self._rows or index not in self._parts:
            self._rows, self._parts = rows, dict(enumerate(self._compute(rows).split(self._widths, -1)))
        part = self._parts.pop(index)
        if not self._parts:
            self._rows = None
        return part

    def _compute(self, rows: torch.Tensor) -> torch.Tensor:
        if rows.numel() == 0:
            return rows.new_empty((*rows.shape[:-1], sum(self._widths)))
        rows_in = rows.to(self._dtype).contiguous()
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows_in, self._packed, self._bias, "none", [], "")
        return product.to(rows.dtype)


def has_fast_products(dtype: torch.dtype) -> bool:
    """Return whether this CPU multiplies matrices of ``dtype`` at full speed.

    If not, float32 is several times faster.
    """
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    if dtype == torch.float16:
        return bool(torch.ops.mkldnn._is_mkldnn_fp16_supported())
    return True


def equal_within_rounding(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Return whether two computations of the same rows differ only by rounding in their dtype."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return False
    largest, apart = wanted.detach().abs().max(), (found.detach().double() - wanted.detach().double()).abs().max()
    # Largest difference between two computations of the same rows, relative to the largest value: a few units of
    # rounding
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
    return bool(apart <= tolerance[wanted.dtype] * largest)


def _first_outputs(linear: torch.nn.Linear, rows: torch.Tensor) -> torch.Tensor:
    bias = None if linear.bias is None else linear.bias[:PROOF_OUTPUTS]
    return F.linear(rows, linear.weight[:PROOF_OUTPUTS], bias)


def _groups(model: torch.nn.Module) -> Iterator[list[torch.nn.Linear]]:
    """Yield every plain ``nn.Linear`` on the CPU, in lists of layers that read the same rows."""
    seen: set[int] = set()
    # Names of sibling layers that read the same rows. MLPs are not listed: gate and up are wide enough to be fast
    # alone.
    shared_inputs = (("q_proj", "k_proj", "v_proj"),)
    for module in model.modules():
        children = dict(module.named_children())
        for names in shared_inputs:
            linears = [children[name] for name in names if name in children]
            if len(linears) == len(names) and _can_share(linears):
                seen.update(map(id, linears))
                yield linears  # type: ignore[misc]
        if _is_plain(module) and id(module) not in seen:
            yield [module]  # type: ignore[list-item]


def _is_plain(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is exactly ``nn.Linear``, since a subclass may compute something else."""
    if type(module) is not torch.nn.Linear or "forward" in vars(module):
        return False
    return type(module.weight) is torch.nn.Parameter and module.weight.device.type == "cpu"


def _can_share(linears: list[torch.nn.Module]) -> bool:
    """Return whether ``linears`` are plain layers of one input size and dtype, all with a bias or all without."""
    if not all(map(_is_plain, linears)):
        return False
    kinds = {(each.in_features, each.weight.dtype, each.bias is None) for each in linears}
    return len(kinds) == 1


@functools.cache
def multiplies_alone(kind: type[torch.nn.Linear]) -> bool:
    """Return whether class ``kind`` computes what ``nn.Linear`` does, according to a trial."""
    if kind is torch.nn.Linear:
        return True
    rows, weight, bias = (torch.randn(shape, generator=torch.Generator()) for shape in ((3, 8), (5, 8), (5,)))
    try:
        layer = kind(8, 5)
        layer.weight.data, layer.bias.data = weight, bias
        with torch.inference_mode():
            return torch.allclose(layer(rows), F.linear(rows, weight, bias), atol=1e-6)
    except Exception:  # a subclass of nn.Linear may take other arguments
        return False
