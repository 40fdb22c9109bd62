"""Multi-head latent attention (MLA): a token's latent is cached, instead of the keys and values made from it.

Such a layer caches c, ``kv_lora_rank`` values, and a rotary key r shared by all heads. A head's key is (K·c, r), its
value V·c. So its scores are (Kᵀ·q, q_r)·(c, r), and its output V·(weighted sum of c). R-workers keep one row (c, r) per
token and layer, and attend as one KV head whose values are the row's first part. K and V are multiplied with queries
and outputs either here ("absorbed"), or by R-workers, which then receive less (``--latent-absorption r``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fastdecode.kinds import Absorption, Latent
from fastdecode.sworker.adapters.calls import Attend, Calls, Rule
from fastdecode.sworker.model.prepack import PROOF_ROWS, equal_within_rounding, has_fast_products
from fastdecode.sworker.run.staging import DTYPE_NAME, to_numpy

logger = logging.getLogger(__name__)


class Absorbed(torch.nn.Linear):
    """Takes the place of ``kv_b_proj`` and keeps its weight: K, V of all heads, [heads · (nope + value dims), rank]."""


class LatentRows:
    """The mix-in for a class of MLA modules, by which they send latent rows instead of keys and values.

    The class keeps its own ``forward``.
    """

    kv_b_proj: Absorbed
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    absorbs_here = True
    """True if this process multiplies K and V with queries and outputs; False if R-workers do."""

    def make_calls(self) -> Calls:
        return LatentCalls(self)

    @property
    def absorption(self) -> Absorption | None:
        """Sizes of the K and V projections if R-workers multiply with them; None if this process does."""
        return None if self.absorbs_here else Absorption(self.qk_nope_head_dim, self.v_head_dim)

    def head_weights(self) -> np.ndarray:
        """Return each head's K and V projections, [num_heads, nope + value dims, rank], as a numpy array."""
        return to_numpy(self._heads().cpu())

    def expand_kv(self, kv_nope: torch.Tensor, k_rot: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Replace transformers' expansion: return (latent rows [1, 1, T, rank + rope], empty values).

        A latent row is a row of ``kv_nope`` [1, 1, T, rank] followed by a row of ``k_rot`` [1, 1, T, rope].
        """
        return torch.cat((kv_nope, k_rot), -1), kv_nope[..., :0]

    def absorb(self, query: torch.Tensor) -> torch.Tensor:
        """Multiply queries [1, num_heads, T, nope + rope] by K; return [1, num_heads, T, rank + rope]."""
        nope, rotary = query.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        return torch.cat((multiplied_by_head(nope, self._heads()[:, : self.qk_nope_head_dim]), rotary), -1)

    def expand_output(self, o: torch.Tensor) -> torch.Tensor:
        """Multiply outputs over latents, [1, T, num_heads, rank], by V; return [1, T, num_heads, value dims]."""
        return multiplied_by_head(o.transpose(1, 2), self._heads()[:, self.qk_nope_head_dim :].mT).transpose(1, 2)

    def _heads(self) -> torch.Tensor:
        return self.kv_b_proj.weight.view(-1, self.qk_nope_head_dim + self.v_head_dim, self.kv_lora_rank)


class LatentCalls(Calls):
    """Attention calls of a module that sends latent rows. The S-worker or R-workers absorb its queries."""

    def __init__(self, module: LatentRows) -> None:
        self._rank, self._absorption = module.kv_lora_rank, module.absorption

    def send(
        self, attend: Attend, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        if self._absorption:
            return super().send(attend, module, query, key, value, mask, **kwargs)
        return module.expand_output(super().send(attend, module, module.absorb(query), key, value, mask, **kwargs))

    def layer(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> Latent:
        sizes = query.shape[1], key.shape[1], key.shape[3], self._rank
        return Latent(*sizes, **rule, absorption=self._absorption)

    def weights(self, module: LatentRows) -> Callable[[], np.ndarray] | None:
        return module.head_weights if self._absorption else None

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        return query.shape[1], self._absorption.value_dim if self._absorption else self._rank

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        latents = super().answer(module, query, key, key[..., : self._rank])
        return module.expand_output(latents).contiguous() if self._absorption else latents

    def scored(self, module: Any, query: torch.Tensor) -> torch.Tensor:
        return module.absorb(query) if self._absorption else query

    def finished(self, module: Any, o: torch.Tensor) -> torch.Tensor:
        return module.expand_output(o[None])[0] if self._absorption else o


def multiplied_by_head(rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return ``rows @ weights`` for each head.

    On CPUs without fast 16-bit products this runs in float32 and rounds once, since torch's own products take 3 to 15
    times as long there.
    """
    if rows.device.type != "cpu" or has_fast_products(rows.dtype):
        return rows @ weights
    return (rows.float() @ weights.float()).to(rows.dtype)


def use_latent_rows(model: torch.nn.Module) -> None:
    """Make every MLA module of ``model`` send latent rows, if a trial shows that attention stays the same.

    If the trial fails for any module, all modules stay as they are.
    """
    modules = [module for module in model.modules() if hasattr(module, "expand_kv")]
    for module in modules:
        _unpack_values(module)
    if not modules:
        return
    if not all(map(_is_known, modules)):
        logger.info("%s: keys and values are kept expanded: its latents are not of a known kind", type(model).__name__)
        return
    classes: dict[type, type] = {}
    for module in modules:
        own: Any = type(module)
        if own not in classes:
            classes[own] = type(own.__name__, (LatentRows, own), {"__module__": own.__module__})
        module.__class__ = classes[own]
        module.kv_b_proj.__class__ = Absorbed
    logger.info("%d layers keep latent rows", len(modules))


@torch.no_grad()
def _unpack_values(module: Any) -> None:
    """Replace a packed ``kv_b_proj`` by a plain linear layer. Its outputs for unit vectors give the plain weight."""
    own, width = getattr(module, "kv_b_proj", None), getattr(module, "kv_lora_rank", 0)
    plain = type(own) is torch.nn.Linear and type(own.weight) is torch.nn.Parameter and own.weight.dtype in DTYPE_NAME
    if own is None or plain or getattr(own, "bias", None) is not None:
        return
    norm = module.kv_a_layernorm.weight
    weight = own(torch.eye(width, dtype=norm.dtype, device=norm.device)).T.contiguous()
    module.kv_b_proj = torch.nn.Linear(width, len(weight), bias=False, device="meta")
    module.kv_b_proj.weight = torch.nn.Parameter(weight, requires_grad=False)


def leave_absorption_to_r_workers(model: torch.nn.Module) -> bool:
    """Let R-workers absorb the queries of all modules that send latent rows; return False if ``model`` has none."""
    modules = [module for module in model.modules() if isinstance(module, LatentRows)]
    for module in modules:
        module.absorbs_here = False
    return bool(modules)


def plan_of_latent_heads(model: torch.nn.Module) -> dict[str, str]:
    """Return sharding styles for MLA modules that send latent rows: each rank gets some heads and all latent rows.

    transformers' own plans give all heads of some architectures to every rank.
    """
    styles = {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    owners = [(name, module) for name, module in model.named_modules() if isinstance(module, LatentRows)]
    parts = (
        (f"{name}.{part}", getattr(module, part, None), style)
        for name, module in owners
        for part, style in styles.items()
    )
    return {name: style for name, linear, style in parts if isinstance(linear, torch.nn.Linear)}


@torch.no_grad()
def _is_known(module: Any) -> bool:
    """Return whether ``module.expand_kv`` makes, from random latents, the keys and values that ``kv_b_proj`` gives."""
    projection = getattr(module, "kv_b_proj", None)
    if type(projection) is not torch.nn.Linear or projection.bias is not None:
        return False
    weight, generator = projection.weight, torch.Generator()

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    try:
        latents, rotary = (random(1, 1, PROOF_ROWS, dim) for dim in (module.kv_lora_rank, module.qk_rope_head_dim))
        keys, values = module.expand_kv(latents, rotary)
        nope, num_heads = module.qk_nope_head_dim, keys.shape[1]
        heads = weight.view(num_heads, nope + module.v_head_dim, -1)
        expanded = latents @ heads.mT
        wanted = torch.cat((expanded[..., :nope], rotary.expand(-1, num_heads, -1, -1)), -1)
        return equal_within_rounding(wanted, keys) and equal_within_rounding(expanded[..., nope:], values)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
