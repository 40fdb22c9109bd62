"""Gated feed-forward layers in two calls: a product for gate and up; then activation, rotation and down's product.

The module's code is not changed. The module gets another ``forward`` if a trial on random rows gives equal outputs.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from fastdecode.sworker.model.prepack import PROOF_ROWS
from fastdecode.sworker.products.kernels import activation_of, mostly_equal
from fastdecode.sworker.products.linears import ProductOfCodes

logger = logging.getLogger(__name__)

NAMES = (("gate_proj", "up_proj", "down_proj"), ("gate_up_proj", "gate_up_proj", "down_proj"))
"""Names of a module's gate, up and down layers."""


class GatedLayers:
    """Replaces the ``forward`` of a model's gated layers, and can restore it."""

    def __init__(self, model: torch.nn.Module, products: Mapping[int, ProductOfCodes]) -> None:
        """Replace the ``forward`` of each gated layer for which a trial shows that the two calls give the same rows.

        ``products``: the product of each quantized layer, by the layer's ``id()``.
        """
        self._products = products
        self._replaced: dict[torch.nn.Module, str] = {}  # the kernels' name of each module's activation
        self._forms: dict[tuple[object, ...], str | None] = {}
        for module in model.modules():
            self._replace(module)
        logger.info("%d gated layers in two calls", len(self._replaced))

    def activation_of(self, module: torch.nn.Module) -> str | None:
        """Return the kernels' name of the activation of ``module``; None if its ``forward`` was not replaced."""
        return self._replaced.get(module)

    def undo(self) -> None:
        for module in self._replaced:
            del module.__dict__["forward"]
        self._replaced.clear()

    def _replace(self, module: torch.nn.Module) -> None:
        found = self._products_of(module)
        if not found:
            return
        first, second = found
        function = str(getattr(module, "act_fn", getattr(module, "activation_fn", None)))
        key = type(module), function, first.width, first.num_outputs, second.num_outputs
        if key not in self._forms:
            self._forms[key] = self._proven(module, first, second)
        activation = self._forms[key]
        if activation is not None:
            module.__dict__["forward"] = _forward(first, second, activation)
            self._replaced[module] = activation

    def _products_of(self, module: torch.nn.Module) -> tuple[ProductOfCodes, ProductOfCodes] | None:
        """Return (the product that gate and up share, the product of down); None if the module has no such products.

        Their sizes must fit, and none of the three layers may have hooks, which the two calls would skip.
        """
        children = dict(module.named_children())
        for names in NAMES:
            layers = [children.get(name) for name in names]
            products = [self._products.get(id(layer)) for layer in layers]
            gate, up, down = products
            if gate is None or gate is not up or down is None or any(_is_hooked(layer) for layer in layers):
                continue
            if gate.num_outputs == 2 * down.width:
                return gate, down
        return None

    def _proven(self, module: Any, first: ProductOfCodes, second: ProductOfCodes) -> str | None:
        """Return the activation with which the two calls equal the module's own code; None if no activation does."""
        function: Any = getattr(module, "act_fn", getattr(module, "activation_fn", None))
        rows = torch.randn(1, PROOF_ROWS, first.width, generator=torch.Generator()).to(first.dtype)
        try:
            with torch.inference_mode():
                activation = activation_of(lambda pairs: function(pairs[:, :1]) * pairs[:, 1:], first.dtype)
                wanted = type(module).forward(module, rows)
                if activation and mostly_equal(_forward(first, second, activation)(rows), wanted):
                    return activation
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:  # it takes more than rows
            logger.info("%s is left as it is: %s", type(module).__name__, error)
            return None
        logger.info("%s is left as it is: no known activation gives the same", type(module).__name__)
        return None


def _forward(first: ProductOfCodes, second: ProductOfCodes, activation: str) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda rows: second.compute(first.compute(rows), activation)


def _is_hooked(layer: Any) -> bool:
    return bool(layer._forward_hooks or layer._forward_pre_hooks)
