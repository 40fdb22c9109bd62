"""Experts that keep their weights packed, as a checkpoint has them, and unpack them whenever they compute.

The packed tensors of all experts are stacked. On a GPU one launch unpacks all experts of a layer, since a CUDA graph
cannot choose among experts. On the CPU only experts with rows are unpacked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from transformers.integrations.moe import grouped_mm_experts_forward

from fastdecode.sworker.adapters.experts import experts_forward
from fastdecode.sworker.model.formats import Layout, Tensors


class ExpertPart:
    """One projection of all experts, whose packed tensors are buffers of the experts' module."""

    def __init__(self, module: torch.nn.Module, layout: Layout, prefix: str, sizes: tuple[int, int]) -> None:
        """``sizes``: outputs and inputs of one expert. ``prefix``: of the buffers' names in ``module``."""
        self._module, self._layout, self._prefix, self.sizes = module, layout, prefix, sizes

    def unpacked(self, dtype: torch.dtype, chosen: torch.Tensor | None) -> torch.Tensor:
        """Return the weights of ``chosen`` experts (None: all): [experts, outputs, inputs]."""
        tensors = {leaf: each if chosen is None else each[chosen] for leaf, each in self.tensors()}
        if self._layout.axis is None:
            return self._layout.unpack(tensors, dtype)
        if self._layout.joins(self.sizes[0]):
            return self._together(tensors, dtype)
        number = len(next(iter(tensors.values())))
        shape = torch.tensor(self.sizes)
        each = ({leaf: tensor[index] for leaf, tensor in tensors.items()} for index in range(number))
        return torch.stack([self._layout.unpack(own | {"weight_shape": shape}, dtype) for own in each])

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the packed tensors of all experts, [experts, …], by their names within the layout."""
        for name, tensor in self._module._buffers.items():
            if name.startswith(self._prefix) and tensor is not None:
                yield name.removeprefix(self._prefix), tensor

    def _together(self, tensors: Tensors, dtype: torch.dtype) -> torch.Tensor:
        """Unpack all experts in one call, as a single weight that has the outputs of all."""
        axis = self._layout.axis or 0
        long = {leaf: each.movedim(0, axis).flatten(axis, axis + 1) if each.ndim > 1 else each
                for leaf, each in tensors.items()}  # fmt: skip
        number = len(next(iter(tensors.values())))
        shape = torch.tensor([number * self.sizes[0], self.sizes[1]])
        return self._layout.unpack(long | {"weight_shape": shape}, dtype).unflatten(0, (number, -1))


class KeptExperts:
    """Replaces the forward of an experts' module by one that unpacks the module's packed weights."""

    def __init__(self, module: Any, parts: Mapping[str, list[ExpertPart]]) -> None:
        """``parts``: for each packed parameter, its projections, which lie side by side along the outputs."""
        self._module, self._parts = module, parts
        self._shapes = [torch.empty_like(each, device="meta") for each in module.parameters()]
        for name in parts:
            del module._parameters[name]
        module._is_hf_initialized = True  # so that transformers does not initialize the removed parameters
        module.__dict__["kept_experts"] = self
        module.__dict__["forward"] = self.forward

    @property
    def num_weights(self) -> int:
        """The number of weights that are packed."""
        each = (part.sizes[0] * part.sizes[1] for parts in self._parts.values() for part in parts)
        return int(self._module.num_experts) * sum(each)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return each row's weighted sum of its experts' outputs, [rows, hidden]; ``top_k_index``: int64 [rows, k]."""
        if hidden_states.device.type != "cpu":
            every = SomeExperts(self._module, self._parts, hidden_states.dtype, None, self._shapes)
            return grouped_mm_experts_forward(every, hidden_states, top_k_index, top_k_weights)
        chosen = torch.unique(top_k_index)
        some = SomeExperts(self._module, self._parts, hidden_states.dtype, chosen, self._shapes)
        return experts_forward(some, hidden_states, torch.searchsorted(chosen, top_k_index), top_k_weights)


class SomeExperts:
    """A view of an experts' module for one forward, with unpacked weights of the chosen experts.

    All other attributes are the module's own.
    """

    def __init__(
        self,
        module: Any,
        parts: Mapping[str, list[ExpertPart]],
        dtype: torch.dtype,
        chosen: torch.Tensor | None,
        shapes: Sequence[torch.Tensor] = (),
    ) -> None:
        """``chosen``: ascending indices of experts; None for all. ``shapes``: what :meth:`parameters` yields."""
        self._module, self._dtype, self._chosen, self._parts = module, dtype, chosen, parts
        self._shapes = shapes
        self.num_experts = module.num_experts if chosen is None else len(chosen)

    def parameters(self) -> Iterator[torch.Tensor]:
        """Return tensors without memory, in the shapes that the parameters had before they were packed."""
        return iter(self._shapes)

    def __getattr__(self, name: str) -> Any:
        """Return an unpacked weight, a bias of the chosen experts, or another attribute of the module."""
        if name in self._parts:
            found = [part.unpacked(self._dtype, self._chosen) for part in self._parts[name]]
            return found[0] if len(found) == 1 else torch.cat(found, 1)
        own = getattr(self._module, name)
        return own[self._chosen] if name.endswith("_proj_bias") and self._chosen is not None else own


def keeps_experts(module: Any) -> bool:
    """Return whether ``module`` holds experts in stacked parameters, as transformers' grouped products take them."""
    return hasattr(module, "_apply_gate") and hasattr(module, "is_transposed") and hasattr(module, "num_experts")
