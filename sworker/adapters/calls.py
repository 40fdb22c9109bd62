"""Attention calls by kind: what a layer's call passes on, how R-workers see the layer, and how o is made.

There is one class per kind. A module that is not dense makes its own by ``make_calls``. An index or a recurrence is
passed beside the call, as an object that is itself of such a class.
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
        """Return a function that makes the weights for R-workers to multiply with; None if they need none."""
        return None

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        """Return the heads of a row of o, and the elements of each."""
        return query.shape[1], value.shape[3]

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return a stand-in for o made of values: each query head gets its KV head's values."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    def scored(self, module: Any, query: torch.Tensor) -> torch.Tensor:
        """Return queries in the form in which torch scores them on the model's device."""
        return query

    def finished(self, module: Any, o: torch.Tensor) -> torch.Tensor:
        """Return o for queries from :meth:`scored` as R-workers would have returned it."""
        return o


DENSE = Calls()
"""Calls of modules without calls of their own."""


INDEX_ARGUMENTS = ("indices", "block_indices")
"""Names of attention arguments that hold an indexer's picks."""


def index_argument(kwargs: dict[str, Any]) -> str | None:
    """Return the name of the argument that holds an index; None without one."""
    return next((name for name in INDEX_ARGUMENTS if hasattr(kwargs.get(name), "send_before")), None)


def calls_of(module: Any) -> Calls:
    """Return the calls of a module's kind."""
    make = getattr(type(module), "make_calls", None)  # of the class: missing attributes of modules are slow
    return make(module) if make else DENSE
