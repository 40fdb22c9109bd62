"""GPU kernels for norms, rotary embeddings and gated activations: one launch each, instead of torch's two to ten.

The model's code is not changed: single modules get another ``forward``. Each is first compared with the model's own on
random rows, and not used if they differ by more than rounding. Without triton nothing is replaced.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch

from fastdecode.sworker.model.fused import ROTARY, are_rotated_whole, eps_of, rotates_alike, with_global
from fastdecode.sworker.model.prepack import PROOF_ROWS, equal_within_rounding
from fastdecode.sworker.run.staging import DTYPE_NAME

logger = logging.getLogger(__name__)

NORM_FORMS = ((0.0, True), (0.0, False), (1.0, False))
"""Forms of RMSNorm: (number added to the weight, whether rows are rounded before multiplying by the weight)."""

Forward = Callable[[torch.Tensor], torch.Tensor]


class GpuRows:
    """Replaces modules' ``forward`` by GPU kernels, and can restore them."""

    def __init__(self, model: torch.nn.Module, anywhere: bool = False) -> None:
        """Replace every module for which a trial shows that our kernel computes the same.
        ``anywhere``: also on a CPU, by triton's interpreter.
        """
        self.counts = {"norms": 0, "rotary embeddings": 0, "gated activations": 0}
        self._replaced: list[torch.nn.Module] = []
        self._proven: dict[tuple[object, ...], Any] = {}
        first = next(model.parameters())
        if first.dtype not in DTYPE_NAME or not (anywhere or first.device.type == "cuda"):
            return
        if find_spec("triton") is None:
            logger.warning(
                "norms, rotary embeddings and activations run as torch's operations: triton is not installed"
            )
            return
        self._device, self._dtype = first.device, first.dtype
        for module in model.modules():
            self._replace(module)
        logger.info("on the GPU, in one launch each: %s", ", ".join(f"{n} {name}" for name, n in self.counts.items()))

    def undo(self) -> None:
        for module in self._replaced:
            module.__dict__.pop("forward", None)
        self._replaced.clear()

    def _replace(self, module: Any) -> None:
        if "forward" in vars(module):
            return
        kind: Any = type(module)
        weight = module._parameters.get("weight")
        if kind.__name__.endswith("RMSNorm") and weight is not None and weight.ndim == 1 and eps_of(module) is not None:
            form = self._once((kind, weight.shape, weight.dtype), lambda: self._norm_form(module))
            self._attach("norms", module, form and _norm_forward(module, *form))
        elif ROTARY in getattr(getattr(kind.forward, "__code__", None), "co_names", ()):
            self._attach("rotary embeddings", module, self._rotary(module))
        elif all(hasattr(module, name) for name in ("gate_proj", "up_proj", "down_proj")) and _is_silu(module):
            sizes = module.gate_proj.in_features, module.gate_proj.out_features
            proven = self._once((kind, *sizes), lambda: self._is_gated(module))
            self._attach("gated activations", module, _gated_forward(module) if proven else None)

    def _once(self, key: tuple[object, ...], prove: Callable[[], Any]) -> Any:
        if key not in self._proven:
            try:
                with torch.inference_mode():
                    self._proven[key] = prove()
            except Exception as error:  # the kernel does not fit this module or does not compile here
                logger.info("%s is left as it is: %s", key[0], error)
                self._proven[key] = None
        return self._proven[key]

    def _attach(self, name: str, module: torch.nn.Module, forward: Callable[..., Any] | None) -> None:
        if forward:
            module.__dict__["forward"] = forward
            self._replaced.append(module)
            self.counts[name] += 1

    def _random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator()).to(self._device, self._dtype)

    def _norm_form(self, norm: Any) -> tuple[float, bool] | None:
        rows = self._random(1, PROOF_ROWS, len(norm.weight)).to(norm.weight.dtype)
        wanted = type(norm).forward(norm, rows)
        return next(
            (form for form in NORM_FORMS if equal_within_rounding(_norm_forward(norm, *form)(rows), wanted)), None
        )

    def _rotary(self, module: Any) -> Callable[..., Any] | None:
        forward, head_dim = type(module).forward, getattr(module, "head_dim", None)
        own = forward.__globals__.get(ROTARY)
        if own is None or not isinstance(head_dim, int) or head_dim % 2:
            return None
        rotary = self._once((own, head_dim), lambda: self._rotation(own, head_dim))
        return types.MethodType(with_global(forward, ROTARY, rotary), module) if rotary else None

    def _rotation(self, own: Callable[..., Any], head_dim: int) -> GpuRotary | None:
        rotary = GpuRotary(own)
        return rotary if rotates_alike(rotary, head_dim, self._dtype, self._device) else None

    def _is_gated(self, module: Any) -> bool:
        rows = self._random(1, PROOF_ROWS, module.gate_proj.in_features)
        return equal_within_rounding(_gated_forward(module)(rows), type(module).forward(module, rows))


class GpuRotary:
    """Computes ``apply_rotary_pos_emb`` by one launch each for q and k. Unknown forms go to the model's function."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **options: Any
    ) -> Any:
        """Return q and k, [1, heads, T, dim], rotated by the angles of cos and sin, [1, T, dim]."""
        from fastdecode.sworker.model.triton_rows import rotate

        if more or options or not are_rotated_whole(q, k, cos):
            return self.own(q, k, cos, sin, *more, **options)
        return rotate(q, cos.contiguous(), sin.contiguous()), rotate(k, cos.contiguous(), sin.contiguous())


def _norm_forward(norm: Any, offset: float, round_first: bool) -> Forward:
    from fastdecode.sworker.model.triton_rows import rms_norm

    eps, dtype = float(eps_of(norm) or 0.0), norm.weight.dtype

    def forward(x: torch.Tensor) -> torch.Tensor:
        if x.dtype != dtype:
            own: torch.Tensor = type(norm).forward(norm, x)
            return own
        return rms_norm(x, norm.weight, eps, offset, round_first)

    return forward


def _gated_forward(module: Any) -> Forward:
    from fastdecode.sworker.model.triton_rows import silu_times

    def forward(x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = module.down_proj(silu_times(module.gate_proj(x), module.up_proj(x)))
        return down

    return forward


def _is_silu(module: Any) -> bool:
    return (
        isinstance(getattr(module, "act_fn", None), torch.nn.SiLU)
        or "silu" in str(getattr(module, "act_fn", "")).lower()
    )
