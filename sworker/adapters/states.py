"""Recurrent layers: the R-worker with a sequence's state computes its convolution and recurrence.

transformers computes both in functions of its modeling modules: the convolution of rows, then the recurrence over the
result. Our forwards replace these functions. The convolution returns its rows unchanged. The recurrence sends these
rows, with decays and rates, to the R-worker, as attention sends q, k and v. If the model computes something between the
convolution and the recurrence (Mamba-1, the RG-LRU), both are sent as separate layers. Projections, gates and norms
stay the model's own code. Recurrences that are methods of modules have adapters in `own_recurrences.py`.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from greenlet import getcurrent

from fastdecode.kinds import Recurrent
from fastdecode.sworker.adapters.calls import Calls, Rule
from fastdecode.sworker.run.pipeline import ModelGreenlet


@dataclass(frozen=True)
class Convolution:
    """A causal depthwise convolution: ``weight`` [channels, taps], ``bias`` [channels] or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    silu: bool


@dataclass(frozen=True)
class Recurrence(Calls):
    """The attention calls of a recurrent layer, for its recurrence and the convolution before it."""

    caches_rows = False

    kind: Literal["delta", "scan", "window", "selective", "lru"]
    convolution: Convolution | None
    heads: int
    value_dim: int
    groups: int = 0
    key_dim: int = 0
    decays: int = 0
    norm: bool = False
    skip: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def layer(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> Recurrent:
        first = self.convolution
        taps, silu, weight, bias = (
            (first.weight.shape[1], first.silu, first.weight.T, first.bias) if first else (1, False, None, None)
        )
        scale = self.key_dim**-0.5 if self.kind == "delta" else 1.0
        return Recurrent(
            self.heads, self.value_dim, scale, self.kind, self.groups, self.key_dim, taps, self.decays, silu, self.norm,
            key.shape[3], _bytes_of(weight), _bytes_of(bias), _bytes_of(self.skip), _bytes_of(self.factors),
        )  # fmt: skip

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        return self.heads, self.value_dim

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return each row's first channels in place of o. The trial forward at loading computes no recurrence."""
        return key[0, :, :, : self.heads * self.value_dim].unflatten(-1, (self.heads, self.value_dim)).contiguous()


def _bytes_of(tensor: torch.Tensor | None) -> bytes:
    return b"" if tensor is None else tensor.detach().float().contiguous().cpu().numpy().tobytes()


def advance(rows: torch.Tensor, recurrence: Recurrence) -> torch.Tensor:
    """Send ``rows`` [T, elements] to the R-worker for ``recurrence``; return o [1, T, heads, value_dim]."""
    none = rows.new_empty(1, 1, len(rows), 0)
    return recurrence.send(_forward().attend, None, none, rows[None, None], none, None)


def _forward() -> ModelGreenlet:
    current = getcurrent()
    if not isinstance(current, ModelGreenlet):
        raise RuntimeError("a model loaded by FastDecode runs only inside its pipeline")
    return current


def payload(channels: tuple[torch.Tensor, ...], numbers: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Return payload rows [T, elements]: first ``channels`` [1, T, …], then ``numbers`` [1, T, …] as float32 bits."""
    parts = [part[0].flatten(1) for part in channels]
    bits = [number[0].float().flatten(1) for number in numbers]
    return torch.cat([*parts, torch.cat(bits, -1).view(parts[0].dtype)], -1)


def _convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Record the convolution, for the recurrence to send; return ``hidden_states`` [1, channels, T] unchanged."""
    _forward().convolution = Convolution(weight, bias, activation is not None)
    return hidden_states


def convolved(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor:
    """Let the R-worker convolve ``hidden_states`` [1, channels, T]; return the convolved tensor, of the same shape."""
    heads, dim = as_heads(hidden_states.shape[1])
    convolution = Convolution(weight, bias, activation is not None)
    recurrence = Recurrence("window", convolution, heads, dim)
    rows = hidden_states[0].T.contiguous()
    # A copy, since the next call overwrites the staging buffer of o, and Zamba calls once per head.
    return advance(rows, recurrence).flatten(2).transpose(1, 2).clone()


def as_heads(channels: int) -> tuple[int, int]:
    """Return (heads, channels per head), into which R-workers divide ``channels`` independent channels."""
    # Possible channels per head. R-workers give each thread some heads of a sequence; one head would use one thread.
    window_dims = (64, 32, 16)
    dim = next((dim for dim in window_dims if channels % dim == 0), 1)
    return channels // dim, dim


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *_: Any,
    use_qk_l2norm_in_kernel: bool = False,
    **__: Any,
) -> tuple[torch.Tensor, None]:
    """Let the R-worker convolve rows and compute the gated delta rule over them.

    ``g``: [1, T, heads] or [1, T, heads, key_dim].
    """
    heads, value_dim = value.shape[2:]
    groups, key_dim = key.shape[2:]
    decays = key_dim if g.dim() == 4 else 1
    rows = payload((query, key, value), (g, beta))
    recurrence = Recurrence(
        "delta", _forward().convolution, heads, value_dim, groups, key_dim, decays, use_qk_l2norm_in_kernel
    )
    return advance(rows, recurrence), None


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *_: Any,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **__: Any,
) -> torch.Tensor:
    """Let the R-worker convolve rows and compute Mamba-2's scan; time steps are made from ``dt`` as in transformers."""
    dt = dt if dt_bias is None else dt + dt_bias.to(dt.dtype)
    dt = torch.clamp(F.softplus(dt) if dt_softplus else dt, min=dt_limit[0], max=dt_limit[1]).float()
    heads, value_dim = hidden_states.shape[2:]
    groups, key_dim = B.shape[2:]
    rows = payload((hidden_states, B, C), (A.float() * dt, dt))
    return advance(rows, Recurrence("scan", _forward().convolution, heads, value_dim, groups, key_dim, 1, skip=D))


def _selective_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Let the R-worker compute Mamba-1's scan of ``hidden_states`` [1, channels, T]; ``A`` is [channels, key_dim]."""
    dt = dt if delta_bias is None else dt + delta_bias.to(dt.dtype)[:, None]
    dt = F.softplus(dt) if delta_softplus else dt
    heads, dim = as_heads(hidden_states.shape[1])
    skipped = 0.0 if D is None else hidden_states * D[:, None]
    rows = payload(tuple(each.transpose(1, 2) for each in (hidden_states, B, C)), (dt.transpose(1, 2),))
    recurrence = Recurrence("selective", None, heads, dim, 1, A.shape[1], factors=A.T)
    out = advance(rows, recurrence).flatten(2).transpose(1, 2) + skipped
    return out if z is None else out * F.silu(z)


def use_states(model: torch.nn.Module) -> bool:
    """Let R-workers compute the recurrent layers of ``model``; return False if it has no layers of a known form."""
    modules = {sys.modules[type(each).__module__] for each in model.modules()}
    convolution = "causal_conv1d_fn"
    found = [each for each in modules if hasattr(each, convolution)]
    # For each function of transformers' modeling modules, our replacement
    recurrences: dict[str, Callable[..., Any]] = {
        "torch_chunk_gated_delta_rule": _delta_rule,
        "chunk_kimi_delta_attention": _delta_rule,
        "mamba2_chunk_scan": _scan,
        "mamba_selective_scan": _selective_scan,
    }
    # Functions whose inputs the model computes from convolved rows, so the convolution is sent first, as its own layer
    of_convolved = frozenset(("mamba_selective_scan",))
    for module in found:
        names = {name for name in recurrences if hasattr(module, name)}
        for name in names:
            replace(module, name, recurrences[name])
        replace(module, convolution, _convolution if names - of_convolved else convolved)
    return bool(found)


def replace(module: ModuleType | type, name: str, ours: Callable[..., Any]) -> None:
    """Replace function ``name`` of a module or class by ``ours`` in our forwards; other callers get the original."""
    theirs = getattr(module, name)
    if hasattr(theirs, "in_forwards"):
        return

    @functools.wraps(theirs)
    def either(*args: Any, **kwargs: Any) -> Any:
        return (ours if isinstance(getcurrent(), ModelGreenlet) else theirs)(*args, **kwargs)

    either.in_forwards = ours  # type: ignore[attr-defined]
    setattr(module, name, either)
