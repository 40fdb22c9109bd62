"""One-pass norms and rotary embeddings, instead of torch's five to ten passes (CPU, float32 and bfloat16).

The model's code is not changed. A norm gets its own ``forward``, and an attention layer its class's ``forward`` with
another ``apply_rotary_pos_emb``. Each replacement is first compared with the model's own code on random rows, and not
used if they differ by more than rounding.
"""

from __future__ import annotations

import logging
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from fastdecode import _sworker
from fastdecode.sworker.model.prepack import PROOF_ROWS, equal_within_rounding
from fastdecode.sworker.run.staging import rows_of, to_numpy

logger = logging.getLogger(__name__)

ROTARY = "apply_rotary_pos_emb"
"""The function with which nearly all models of transformers rotate q and k."""

DTYPES = (torch.float32, torch.bfloat16)


class FusedRows:
    """Replaces norms and rotary embeddings of a model by one-pass forms, and can restore them."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Replace each norm and rotary embedding of ``model`` whose one-pass form gives equal results in a trial."""
        self.num_norms = self.num_rotary = 0
        self._replaced: list[torch.nn.Module] = []
        self._norm_forms: dict[tuple[object, ...], Callable[[torch.nn.Module], OnePassNorm] | None] = {}
        self._rotations: dict[tuple[object, ...], Rotary | None] = {}
        dtype = next(model.parameters()).dtype
        for module in model.modules() if next(model.parameters()).device.type == "cpu" and dtype in DTYPES else ():
            if type(module).__name__.endswith("RMSNorm"):
                self._replace_norm(module)
            elif ROTARY in getattr(getattr(type(module).forward, "__code__", None), "co_names", ()):
                self._replace_rotary(module, dtype)
        logger.info("%d norms and %d rotary embeddings in one pass", self.num_norms, self.num_rotary)

    def undo(self) -> None:
        for module in self._replaced:
            del module.__dict__["forward"]
        self._replaced.clear()

    def _replace_norm(self, module: torch.nn.Module) -> None:
        weight = getattr(module, "weight", None)
        if (
            not isinstance(weight, torch.Tensor)
            or weight.ndim != 1
            or weight.dtype not in DTYPES
            or eps_of(module) is None
        ):
            return
        key = type(module), weight.shape, weight.dtype
        if key not in self._norm_forms:
            self._norm_forms[key] = _proven_norm(module)
        form = self._norm_forms[key]
        if form is not None:
            self._attach(module, form(module))
            self.num_norms += 1

    def _replace_rotary(self, module: torch.nn.Module, dtype: torch.dtype) -> None:
        forward, head_dim = type(module).forward, getattr(module, "head_dim", None)
        own = forward.__globals__.get(ROTARY)
        if own is None or not isinstance(head_dim, int) or head_dim % 2:
            return
        key = own, head_dim
        if key not in self._rotations:
            rotary = Rotary(own)
            self._rotations[key] = rotary if rotates_alike(rotary, head_dim, dtype) else None
        rotary_or_none = self._rotations[key]
        if rotary_or_none is not None:
            self._attach(module, types.MethodType(with_global(forward, ROTARY, rotary_or_none), module))
            self.num_rotary += 1

    def _attach(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward
        self._replaced.append(module)


def are_rotated_whole(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor) -> bool:
    """Return whether q and k have shape [1, heads, T, dim] and dtype of ``cos``, and ``cos`` covers all ``dim``."""
    fits = all(each.ndim == 4 and len(each) == 1 and each.dtype == cos.dtype for each in (q, k))
    return fits and cos.shape == (1, q.shape[2], q.shape[3])


class Rotary:
    """Computes ``apply_rotary_pos_emb`` in one pass. Arguments of unknown form go to the model's own function."""

    def __init__(self, own: Callable[..., Any]) -> None:
        self.own = own

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *more: Any, **options: Any
    ) -> Any:
        """Return q and k, [1, heads, T, dim], rotated by the angles of cos and sin, [1, T, dim]."""
        if more or options or not are_rotated_whole(q, k, cos):
            return self.own(q, k, cos, sin, *more, **options)
        angles = to_numpy(cos[0]), to_numpy(sin[0])
        return _rotated(q, *angles), _rotated(k, *angles)


def _rotated(heads: torch.Tensor, cos: Any, sin: Any) -> torch.Tensor:
    rows = rows_of(heads)
    if rows.stride(2) != 1 or rows.stride(1) != rows.shape[2]:
        rows = rows.clone(memory_format=torch.contiguous_format)  # the kernel takes dense rows only
    out = torch.empty(rows.shape, dtype=rows.dtype)
    _sworker.rotate(_array(rows), cos, sin, _array(out), torch.get_num_threads())
    return out.transpose(0, 1)[None]


def _array(rows: torch.Tensor) -> Any:
    return (rows if rows.dtype == torch.float32 else rows.view(torch.uint16)).numpy()


def eps_of(norm: torch.nn.Module) -> float | None:
    return next((getattr(norm, name) for name in ("variance_epsilon", "eps") if hasattr(norm, name)), None)


class OnePassNorm:
    """The forward of a norm, in one pass. Rows of another dtype than the weight's go to the norm's own code."""

    def __init__(self, norm: Any, offset: float, round_first: bool) -> None:
        """``offset`` is added to the weight. ``round_first``: rows are rounded before the weight multiplies them."""
        self.weight = (norm.weight.detach().float() + offset).numpy()
        self.eps, self.round_first = float(eps_of(norm) or 0.0), round_first
        self._norm, self._dtype = norm, norm.weight.dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` [..., dim], normed."""
        if x.dtype != self._dtype:
            own: torch.Tensor = type(self._norm).forward(self._norm, x)
            return own
        x = x.contiguous()
        out = torch.empty(x.shape, dtype=self._dtype)
        rows, normed = (_array(each).reshape(-1, len(self.weight)) for each in (x, out))
        _sworker.rms_norm(rows, self.weight, self.eps, self.round_first, normed, torch.get_num_threads())
        return out


def _proven_norm(norm: Any) -> Callable[[torch.nn.Module], OnePassNorm] | None:
    """Return a function that makes one-pass forwards for norms like ``norm``; None if no form gives equal results.

    The forms multiply by the weight after rounding, by the weight before rounding, or by one plus the weight.
    """
    rows = torch.randn(1, PROOF_ROWS, len(norm.weight), generator=torch.Generator()).to(norm.weight.dtype)
    for offset, round_first in ((0.0, True), (0.0, False), (1.0, False)):
        with torch.inference_mode():
            found = OnePassNorm(norm, offset, round_first)(rows)
            if equal_within_rounding(found, type(norm).forward(norm, rows)):
                return partial(OnePassNorm, offset=offset, round_first=round_first)
    logger.info("%s is left as it is: no known form of RMSNorm gives the same", type(norm).__name__)
    return None


def rotates_alike(rotary: Any, head_dim: int, dtype: torch.dtype, device: torch.device | None = None) -> bool:
    """Return whether ``rotary`` equals the model's own function for random q, k, cos and sin."""
    generator = torch.Generator()
    shapes = ((1, 4, PROOF_ROWS, head_dim), (1, 2, PROOF_ROWS, head_dim), *[(1, PROOF_ROWS, head_dim)] * 2)
    arguments = [torch.randn(shape, generator=generator).to(device, dtype) for shape in shapes]
    try:
        pairs = zip(rotary(*arguments), rotary.own(*arguments), strict=True)
        return all(equal_within_rounding(found, wanted) for found, wanted in pairs)
    except Exception as error:  # the model's rotation function takes other arguments
        logger.info("%s is left as it is: %s", ROTARY, error)
        return False


def with_global(function: Any, name: str, value: object) -> types.FunctionType:
    """Return a copy of ``function`` in which one global name has another value."""
    copy = types.FunctionType(
        function.__code__,
        {**function.__globals__, name: value},
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy
