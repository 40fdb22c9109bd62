"""Attention calls by kind: what a layer's call hands over, what R-workers are told of the layer, and what answers.

One class per kind. A module of another kind than dense makes its own by ``make_calls``. An index and a recurrence are
handed over beside it, as objects that are of such a class themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Required, TypedDict

import torch

from fastdecode.kinds import Dense, Layer

Attend = Callable[..., torch.Tensor]
"""Answers a call: of a module, q, k, v, a mask and keyword arguments, o [1, T, heads, dim]."""


class Rule(TypedDict, total=False):
    """How a layer that attends scores, as its call says and its mask shows; see ``Attending``."""

    scale: Required[float]
    window: int
    soft_cap: float
    sinks: tuple[float, ...]
    alibi_slopes: tuple[float, ...]
    chunked: bool


class Calls:
    """Calls of dense layers. Shapes are those of transformers: q, k, v [1, heads, T, dim], o [1, T, heads, dim]."""

    caches_rows = True
    """False if a call hands over payload rows for a state, as k alone."""

    def send(
        self, attend: Attend, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """Hand a call over to ``attend``, and return o as the module expects it."""
        return attend(module, query, key, value, mask, calls=self, **kwargs)

    def layer(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: Rule) -> Layer:
        """Return what R-workers are told of a layer that hands over these."""
        return Dense(query.shape[1], key.shape[1], key.shape[3], value.shape[3], **rule)

    def weights(self, module: Any) -> Callable[[], Any] | None:
        """Return what makes the weights that R-workers multiply, None if they multiply none."""
        return None

    def output(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[int, int]:
        """Return heads, and elements of each, of a row of o."""
        return query.shape[1], value.shape[3]

    def answer(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Return each query head's values as o, one row after another as o is."""
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous()

    def scored(self, module: Any, query: torch.Tensor) -> torch.Tensor:
        """Return queries as torch scores them where the model is."""
        return query

    def finished(self, module: Any, o: torch.Tensor) -> torch.Tensor:
        """Return o of queries from :meth:`scored` as R-workers would have answered it."""
        return o


DENSE = Calls()
"""Calls of modules that have none of their own."""


INDEX_ARGUMENTS = ("indices", "block_indices")
"""Names of what an indexer picked among an attention call's arguments."""


def index_argument(kwargs: dict[str, Any]) -> str | None:
    """Return the argument with which an index comes that is handed over beside the call; None without one."""
    return next((name for name in INDEX_ARGUMENTS if hasattr(kwargs.get(name), "send_before")), None)


def calls_of(module: Any) -> Calls:
    """Return the calls of a module's kind."""
    make = getattr(type(module), "make_calls", None)  # of the class: a module that lacks an attribute looks long for it
    return make(module) if make else DENSE
