"""The await point: a model's attention call leaves its greenlet and comes back with o.

transformers looks attention functions up by name in a process-wide table, so the function registered here is
stateless: the greenlet that calls it, a :class:`ModelGreenlet`, says what attention means.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from greenlet import getcurrent, greenlet
from transformers import AttentionInterface

ATTENTION_NAME = "fastdecode"
"""The ``attn_implementation`` under which models call us."""


class ModelGreenlet(greenlet):
    """A greenlet in which a model's forward runs; ``attend`` answers its attention calls."""

    def __init__(self, run: Callable[[], Any], attend: Callable[..., torch.Tensor]) -> None:
        super().__init__(run)
        self.attend = attend


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """``query`` [1, num_heads, T, head_dim], ``key`` and ``value`` [1, num_kv_heads, T, …] → o [1, T, num_heads, …]."""
    current = getcurrent()
    if not isinstance(current, ModelGreenlet):
        raise RuntimeError("a model loaded by FastDecode runs only inside its pipeline")
    return current.attend(module, query, key, value, attention_mask, **kwargs), None


def register_attention() -> None:
    """Make ``attn_implementation="fastdecode"`` known to transformers; without a mask function it builds no masks."""
    AttentionInterface.register(ATTENTION_NAME, attend)
