"""Reads the masks that a model requests from transformers, to learn which tokens each layer's queries see.

Most models also pass their sliding windows to the attention call; others only call transformers' mask functions.
FastDecode's forwards build no masks. So a trial forward at loading uses an attention name for which transformers builds
masks. A layer's rule is then the rule of the mask in its attention call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from greenlet import getcurrent
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PretrainedConfig

from fastdecode.sworker.run.pipeline import ModelGreenlet, attend
from fastdecode.sworker.run.prompts import Sight

PROBE_NAME = "fastdecode_probe"
"""The ``attn_implementation`` under which a probed model requests masks."""

SQUARE = 48
"""Length in tokens of the text for which every (query, key) pair of a mask is examined."""


@dataclass(frozen=True)
class Asked:
    """A mask that the trial forward gave to the model, with the mask function in the model's request for it."""

    mask: torch.Tensor
    function: Callable[..., torch.Tensor]
    local_size: int

    def is_whole(self, mask: torch.Tensor) -> bool:
        """Return whether the model left this mask unchanged, or only cut columns off its end, in ``mask``."""
        return mask.dtype == torch.bool and mask.data_ptr() == self.mask.data_ptr() and bool(mask.all())

    @property
    def reach(self) -> int:
        """Number of tokens that a text needs to show the mask function's whole rule."""
        return max(SQUARE, 3 * self.local_size + 3)

    def sight(self) -> Sight | None:
        """Return the rule by which the mask function shows tokens to queries; None if no known rule fits."""
        queries, keys = _pairs(self.local_size, self.mask.device)
        nought = torch.zeros_like(queries)
        try:
            seen = self.function(nought, nought, queries, keys)
        except (IndexError, RuntimeError, TypeError, ValueError):
            return None  # The function reads data of one text, so it gives no rule for all texts
        seen = seen.broadcast_to(keys.shape)
        rules = Sight(), Sight(self.local_size), Sight(self.local_size, chunked=True)
        return next((rule for rule in rules if torch.equal(seen, rule.sees(queries, keys))), None)


def _pairs(size: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (query positions, key positions) at which a mask function is tried.

    They are all pairs of a short text, and pairs near multiples of ``size``, where windows and chunks end.
    """
    square = torch.arange(SQUARE, device=device)
    edges = torch.tensor([each for times in range(4) for each in range(times * size - 2, times * size + 3)])
    edges = edges[edges >= 0].unique().to(device)
    both = [torch.cartesian_prod(each, each) for each in (square, edges)]
    return torch.cat([each[:, 0] for each in both]), torch.cat([each[:, 1] for each in both])


class MaskProbe:
    """Records the masks that one forward requests, in order."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []

    def give(
        self, function: Callable[..., torch.Tensor], shape: tuple[int, ...], size: int, device: Any
    ) -> torch.Tensor:
        """Record a mask request; return a mask of ``shape`` that hides nothing, recognized later by its address."""
        mask = torch.ones(shape, dtype=torch.bool, device=device)
        self.asked.append(Asked(mask, function, size))
        return mask

    def find(self, mask: torch.Tensor) -> int | None:
        """Return the number of the request answered by ``mask``; None if the model made or changed ``mask``."""
        return next((number for number, asked in enumerate(self.asked) if asked.is_whole(mask)), None)


class ProbedGreenlet(ModelGreenlet):
    """A greenlet that runs a model's forward and passes the forward's mask requests to ``masks``."""

    def __init__(self, run: Callable[[], Any], attend: Callable[..., torch.Tensor], masks: MaskProbe) -> None:
        super().__init__(run, attend)
        self.masks = masks


def _mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., torch.Tensor],
    local_size: int | None = None,
    device: Any = "cpu",
    **_: Any,
) -> torch.Tensor:
    current = getcurrent()
    if not isinstance(current, ProbedGreenlet):
        raise RuntimeError("a model loaded by FastDecode asks for masks only in its probe")
    return current.masks.give(mask_function, (batch_size, 1, q_length, kv_length), local_size or 0, device)


def cached_windows(hf_config: Any) -> list[int]:
    """Return the sliding window of each layer, as transformers' own cache would keep it; 0 means all tokens."""
    try:
        layers = DynamicCache(config=hf_config).layers
    except (AttributeError, KeyError, TypeError, ValueError):
        return []  # a model with its own code may have other keys
    return [int(getattr(layer, "sliding_window", None) or 0) for layer in layers]


@contextlib.contextmanager
def asking_for_masks(model: torch.nn.Module) -> Iterator[None]:
    """Within the context, let the model's forwards request masks from transformers."""
    AttentionInterface.register(PROBE_NAME, attend)
    AttentionMaskInterface.register(PROBE_NAME, _mask)
    found = (getattr(module, "config", None) for module in model.modules())
    configs = {id(each): each for each in found if isinstance(each, PretrainedConfig)}.values()
    names = [(config, config._attn_implementation) for config in configs]
    for config, _ in names:
        config._attn_implementation = PROBE_NAME
    try:
        yield
    finally:
        for config, name in names:
            config._attn_implementation = name
