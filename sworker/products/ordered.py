"""Float products that add in one fixed order, for routers and gates: a row's bits then do not depend on its batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from fastdecode import _sworker
from fastdecode.sworker.model.packed_weight import PackedWeight
from fastdecode.sworker.products.linears import expert_counts


class OrderedWeight(torch.nn.Parameter):
    """A weight [outputs, inputs] with which ``F.linear`` adds in a fixed order. Torch handles other functions."""

    @classmethod
    def of(cls, weight: torch.Tensor) -> OrderedWeight:
        """Return ``weight`` as an ``OrderedWeight`` that shares its memory."""
        ordered: OrderedWeight = torch.Tensor._make_subclass(cls, weight.detach(), False)
        return ordered

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Compute ``F.linear`` by ``ordered_linear``, and any other function as torch does."""
        with torch._C.DisableTorchFunctionSubclass():
            if func is F.linear and not kwargs and args[1].ndim == 2:
                return ordered_linear(*args)
            return func(*args, **(kwargs or {}))


def ordered_linear(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the result of ``F.linear``, computed in float32 in a fixed order and rounded to the dtype of ``rows``."""
    x = rows.detach().reshape(-1, rows.shape[-1]).float().contiguous()
    out = torch.empty(len(x), len(weight))
    own = weight.detach().float().contiguous()
    _sworker.multiply_in_order(x.numpy(), own.numpy(), out.numpy(), torch.get_num_threads())
    found = out if bias is None else out + bias.float()
    return found.view(*rows.shape[:-1], len(weight)).to(rows.dtype)


def order_products(model: torch.nn.Module, hf_config: Any) -> int:
    """Give routers and small unquantized linear layers an ``OrderedWeight``; return the number of such layers."""
    counts, found = expert_counts(hf_config), 0
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or weight.ndim != 2 or isinstance(weight, PackedWeight | OrderedWeight):
            continue
        # Weights of more than 1 << 22 elements keep torch's product, which is much faster for them
        is_router = "Router" in type(module).__name__ or len(weight) in counts
        is_small = type(module) is torch.nn.Linear and "forward" not in vars(module)
        if (is_router or is_small) and weight.numel() <= 1 << 22 and weight.device.type == "cpu":
            module.weight = OrderedWeight.of(weight)
            found += 1
    return found
