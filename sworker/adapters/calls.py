"""Attention calls by kind of layer: what a call sends to R-workers, how it describes the layer, and how o is made.

Each kind of layer has its own class of calls. A module of any kind but dense returns its calls from ``make_calls``. An
index or a recurrence is itself such an object of calls, passed as an argument of the attention call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Required, TypedDict

import torch

from fastdecode.kinds import Dense, Layer

Attend = Callable[..., torch.Tensor]
"""A function from a module, q, k, v, a mask and keyword arguments to o [1, T, heads, dim]."""


class Rule(TypedDict, total=False):
    """The scoring rule of an attending layer, taken from its call and its mask; see ``Attending``."""

    scale: Required[float]
    window: int
    soft_cap: float
    sinks: tuple[float, ...]
    alibi_slopes: tuple[float, ...]
    chunked: bool


class Calls:
    """Calls of dense layers, with transformers' shapes: q, k, v [1, heads, T, dim], o [1, T, heads, dim]."""

    caches_rows = True
    """False if a call passes payload rows for a state, as k alone."""

    def send(
        self, attend: Attend, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Pass a call to ``attend``; return o in the form that the module expects."""
        return attend(module, query, key, value, mask, calls=self, **kwargs)

    def layer(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> Layer:
        """Return R-workers' description of a layer with these q, k, v."""
        return Dense(query.shape[1], key.shape[1], key.shape[3], value.shape[3], **rule)

    def weights(self, module: Any) -> Callable[[], Any] | None:
        """Return a function that makes the layer's weights for R-workers; None if they multiply with no weights."""
        return None

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        """Return the shape of one row of o, (heads, elements per head)."""
        return query.shape[1], value.shape[3]

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return each query head's values in place of o. The trial forward at loading computes no attention."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    def scored(self, module: Any, query: torch.Tensor) -> torch.Tensor:
        """Return ``query`` in the form that torch's attention on the model's device takes."""
        return query

    def finished(self, module: Any, o: torch.Tensor) -> torch.Tensor:
        """Convert ``o``, which torch computed from :meth:`scored` queries, into the form that R-workers return."""
        return o


DENSE = Calls()
"""The calls of modules that have no ``make_calls``."""


INDEX_ARGUMENTS = ("indices", "block_indices")
"""Names of attention arguments that hold an indexer's picks."""


def index_argument(kwargs: dict[str, Any]) -> str | None:
    """Return the name of the attention argument that holds an index; None if no argument does."""
    return next((name for name in INDEX_ARGUMENTS if hasattr(kwargs.get(name), "send_before")), None)


def calls_of(module: Any) -> Calls:
    """Return the ``Calls`` of ``module``, by its kind of layer."""
    # looked up in the class, since a missing attribute of a torch module itself is slow to find
    make = getattr(type(module), "make_calls", None)
    return make(module) if make else DENSE
