"""Trained sparsity: a layer's queries see only the tokens that an index picks.

An indexer has its own queries, and one key per token. R-workers cache these keys beside the layer's keys and values. So
an indexer sends its queries and keys as a separate layer (``fastdecode.kinds.Index``), and R-workers pick the tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from fastdecode.kinds import Index
from fastdecode.sworker.adapters.calls import Attend, Calls, Rule
from fastdecode.sworker.adapters.latents import LatentRows
from fastdecode.sworker.run.staging import DTYPE_NAME

PROOF_ROWS = 24
"""Number of random rows on which an indexer's picks are compared with this module's picks."""


@dataclass
class IndexRows(Calls):
    """The rows of an indexer: q [1, heads, T, query_dim] and k [1, 1, T, dim], whose dot products ``scale`` multiplies.

    ``rule``: the fields of ``Index`` that say how many tokens or blocks are picked. ``is_sent``: True if these rows
    were already sent for another layer.
    """

    q: torch.Tensor
    k: torch.Tensor
    scale: float
    rule: dict[str, int]
    is_sent: bool = False

    def send_before(self, attend: Attend, module: torch.nn.Module) -> None:
        """Send these rows, unless already sent, as an index layer before the layer of ``module``."""
        if not self.is_sent:
            self.is_sent = True
            self.send(attend, module, self.q, self.k, self.k[..., :0], None, scaling=self.scale)

    def layer(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> Index:
        return Index(query.shape[1], key.shape[3], rule["scale"], **self.rule)

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        return query.shape[1], 1

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return super().answer(module, query, key, key[..., :1])


class TokenIndexer:
    """DeepSeek's indexer, mixed into the module's class: all heads together pick tokens, by a weighted sum of scores.

    ``rotates_last``: True if the last dims of a head are the rotated ones (Hunyuan 4). Rows are sent rotated dims
    first, which changes no dot product.
    """

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]
    rotates_last: bool

    def forward(
        self, hidden_states: torch.Tensor, q_resid: torch.Tensor, position_embeddings: Any, *_: Any, **__: Any
    ) -> IndexRows:
        """Return index rows for ``hidden_states`` [1, T, hidden_size] and ``wq_b``'s input ``q_resid`` [1, T, rank]."""
        own: Any = self
        q_rot, q_pass = self._parts(own.wq_b(q_resid).unflatten(-1, (-1, own.head_dim)))
        k_rot, k_pass = self._parts(own.k_norm(own.wk(hidden_states)).unsqueeze(2))
        q_rot, k_rot = type(self).rotate(q_rot, k_rot, *position_embeddings, unsqueeze_dim=2)
        weights = own.weights_proj(hidden_states.to(_dtype_of(own.weights_proj, hidden_states)))
        weights = weights.float() * own.n_heads**-0.5
        q = torch.cat((q_rot, q_pass, _as_elements(weights, q_rot.dtype)), -1)
        k = torch.cat((k_rot, k_pass), -1)
        return IndexRows(q.transpose(1, 2), k.transpose(1, 2), own.softmax_scale, {"picks": own.index_topk})

    def _parts(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        own: Any = self
        width = own.head_dim - own.qk_rope_head_dim if self.rotates_last else own.qk_rope_head_dim
        first, last = rows[..., :width], rows[..., width:]
        return (last, first) if self.rotates_last else (first, last)


class BlockIndexer:
    """MiniMax-M3's indexer, mixed into the module's class: each head picks blocks of tokens for its KV head."""

    rotate: Callable[..., tuple[torch.Tensor, torch.Tensor]]

    def forward(self, hidden_states: torch.Tensor, position_embeddings: Any, *_: Any, **__: Any) -> IndexRows:
        """Return the index rows of ``hidden_states`` [1, T, hidden_size]."""
        own: Any = self
        q = own.q_norm(own.q_proj(hidden_states).unflatten(-1, (-1, own.head_dim))).transpose(1, 2)
        k = own.k_norm(own.k_proj(hidden_states).unflatten(-1, (-1, own.head_dim))).transpose(1, 2)
        cos, sin = (each[..., : own.head_dim] for each in position_embeddings)
        q, k = type(self).rotate(q, k, cos, sin)
        rule = {"picks": own.topk_blocks, "pick_block": own.block_size, "pick_local": own.local_blocks}
        return IndexRows(q, k, 1.0, rule)


def _as_elements(weights: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return float32 [...] as [..., 2] elements of a 16-bit ``dtype`` with the same bits; in float32, append zeros."""
    if dtype == torch.float32:
        return torch.stack((weights, torch.zeros_like(weights)), -1)
    return weights.unsqueeze(-1).contiguous().view(dtype)


def picked(q: torch.Tensor, k: torch.Tensor, layer: Index) -> torch.Tensor:
    """Return which keys each row sees, by plain float32 operations, with which the trial of an indexer compares.

    ``q`` [rows, heads, query_dim] and ``k`` [keys, 1, dim] are an index layer's; the last keys are the rows' own. The
    result is bool [heads, rows, keys], or [1, rows, keys] if all heads pick together. Among equal scores the choice is
    undefined.
    """
    dim = layer.key_head_dim
    scores = torch.einsum("rhd,kd->hrk", q[..., :dim].float(), k[:, 0].float()) * layer.scale
    positions = torch.arange(len(k) - len(q), len(k), device=q.device)
    seen = torch.arange(len(k), device=q.device) <= positions[:, None]
    if not layer.pick_block:
        weights = q[..., dim:].contiguous().view(torch.float32)[..., :1].transpose(0, 1)
        return _best((scores.relu() * weights).sum(0, keepdim=True), seen, layer.picks)
    size = layer.pick_block
    own = positions // size
    blocks = torch.arange(-(-len(k) // size), device=q.device)
    scores = torch.nn.functional.pad(scores.masked_fill(~seen, -torch.inf), (0, -len(k) % size), value=-torch.inf)
    maxima = scores.unflatten(-1, (-1, size)).amax(-1)
    maxima = maxima.masked_fill(blocks > (own - layer.pick_local)[:, None], torch.inf)
    kept = _best(maxima, blocks <= own[:, None], layer.picks)
    return kept.repeat_interleave(size, -1)[..., : len(k)] & seen


def _best(scores: torch.Tensor, seen: torch.Tensor, most: int) -> torch.Tensor:
    scores = scores.masked_fill(~seen, -torch.inf)
    best = scores.topk(min(most, scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter(-1, best, True) & seen


def use_index(model: torch.nn.Module) -> None:
    """Let every indexer of ``model`` send its queries and keys, if R-workers then pick the same tokens in a trial.

    Indexers that fail the trial stay as they are.
    """
    owners = [module for module in model.modules() if isinstance(getattr(module, "indexer", None), torch.nn.Module)]
    for owner in owners:
        found = _proven(owner.indexer, isinstance(owner, LatentRows))
        if found is not None:
            owner.indexer.__class__ = found
            owner.register_forward_pre_hook(_with_some_mask, with_kwargs=True)


def plan_of_picked_heads(model: torch.nn.Module) -> dict[str, str]:
    """Return sharding styles for attention whose index has one head per KV head, which picks tokens for that KV head.

    Each rank gets its part of the attention heads and of the index heads. transformers' own plan gives all heads to
    every rank, since its masks cover all heads.
    """
    named = dict(model.named_modules())
    indexers = [name for name, module in named.items() if isinstance(module, BlockIndexer)]
    kinds = tuple({type(named[name.rpartition(".")[0]]) for name in indexers})
    owners = [name for name, module in named.items() if isinstance(module, kinds)]
    styles = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "colwise") | {"o_proj": "rowwise"}
    plan = {f"{owner}.{name}": style for owner in owners for name, style in styles.items()}
    return plan | {f"{name}.q_proj": "colwise" for name in indexers}


def _with_some_mask(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Add an empty mask to an attention layer's arguments: the layer's code slices the mask, though nobody reads it."""
    if kwargs.get("attention_mask") is None:
        kwargs["attention_mask"] = torch.empty(1, 1, 0, 0)
    return args, kwargs


def _proven(indexer: Any, over_latents: bool) -> type | None:
    """Return a subclass of ``indexer``'s class that sends rows and picks the same in a trial; None if there is none."""
    own, mixin = type(indexer), TokenIndexer if hasattr(indexer, "wq_b") else BlockIndexer
    if over_latents != (mixin is TokenIndexer):
        return None
    # Names of the functions by which transformers' modules rotate; each module imports one of them
    rotations = ("apply_rotary_pos_emb", "apply_rotary_pos_emb_interleave")
    for name, last in product(rotations, (False, True) if mixin is TokenIndexer else (False,)):
        if rotate := getattr(sys.modules[own.__module__], name, None):
            parts = {"__module__": own.__module__, "rotate": staticmethod(rotate), "rotates_last": last}
            found = type(own.__name__, (mixin, own), parts)
            if _picks_the_same(indexer, found):
                return found
    return None


@torch.no_grad()
def _picks_the_same(indexer: Any, found: type) -> bool:
    own, before, tokens = type(indexer), dict(vars(indexer)), issubclass(found, TokenIndexer)
    device = next(indexer.parameters()).device
    places = torch.arange(PROOF_ROWS, device=device)
    seen = places <= places[:, None]
    try:
        vars(indexer).update({"index_topk": 5} if tokens else {"block_size": 4, "topk_blocks": 3})
        arguments = [*_random_rows(indexer, tokens, device), seen[None] if tokens else None, places[None]]
        indices = indexer(*arguments)[0]
        indexer.__class__ = found
        rows = indexer(*arguments)
    except (AttributeError, RuntimeError, TypeError, ValueError):
        return False
    finally:
        indexer.__class__ = own
        vars(indexer).update(before)
    q, k = (each[0].transpose(0, 1) for each in (rows.q, rows.k))
    layer = Index(q.shape[1], k.shape[2], rows.scale, **rows.rule)
    wanted = indices if indices.ndim == 3 else indices[None]
    size = layer.pick_block or 1
    mask = torch.zeros(len(wanted), PROOF_ROWS, PROOF_ROWS // size + 1, dtype=torch.bool, device=device)
    mask.scatter_(-1, wanted.long().remainder(mask.shape[-1]), True)
    return torch.equal(picked(q, k, layer), mask[..., :-1].repeat_interleave(size, -1) & seen)


def _dtype_of(linear: Any, other: torch.Tensor) -> torch.dtype:
    dtype: torch.dtype = getattr(getattr(linear, "weight", None), "dtype", other.dtype)
    return dtype if dtype in DTYPE_NAME else other.dtype


def _random_rows(indexer: Any, tokens: bool, device: torch.device) -> list[Any]:
    generator = torch.Generator().manual_seed(1)
    linears = [indexer.wk, indexer.wq_b] if tokens else [indexer.k_proj]
    sizes = [each.in_features for each in linears]
    dim = indexer.qk_rope_head_dim if tokens else indexer.head_dim
    *rows, angles = (torch.randn(1, PROOF_ROWS, size, generator=generator) for size in (*sizes, dim // 2))
    dtype, angles = _dtype_of(linears[0], next(indexer.parameters())), torch.cat((angles, angles), -1)
    return [
        *(each.to(device, dtype) for each in rows),
        tuple(each.to(device, dtype) for each in (angles.cos(), angles.sin())),
    ]
