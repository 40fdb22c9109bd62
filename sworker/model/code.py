"""The interface of a model's code to the S-worker. The code computes everything between two attention calls.

transformers' code is the default; tests compare other libraries' code with it. An implementation loads a checkpoint,
runs packed rows inside a ``ModelGreenlet``, and calls that greenlet's ``attend`` for attention, with the arguments of
transformers' attention functions. A trial forward at loading reads each layer's layout from these calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fastdecode.kinds.layout import KVLayout


class AnyRank(Protocol):
    """The index and number of tensor-parallel ranks, by which a process loads its part of a model; see ``Rank``."""

    @property
    def index(self) -> int:
        """This rank's number, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks that share the model."""


class ModelCode(Protocol):
    """The code of a loaded model without its attention."""

    module: torch.nn.Module
    least_rows: int
    """Least number of rows of a forward. Smaller ones are padded, so that a row always gets the same bits."""

    @property
    def device(self) -> torch.device:
        """The device of the dense layers."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory as they were loaded; shared weights count once."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters. Tied parameters count once; packed weights count as they are packed."""

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [len(rows), vocab_size] of token ids int64 [1, T] at positions int64 [1, T].

        ``rows``: int64 indices of the tokens that need logits; None for all. Call this inside a ``ModelGreenlet``,
        which answers attention calls.
        """

    def of(self, module: torch.nn.Module) -> ModelCode:
        """Return the same kind of code for ``module``, a part of this model that shares its weights."""


@dataclass(frozen=True)
class LoadedCode:
    """A loaded model. ``layout``: this rank's heads; ``whole_layout``: all heads. ``digest``: hash of the weights."""

    code: ModelCode
    layout: KVLayout
    whole_layout: KVLayout
    digest: str


def bytes_of(module: torch.nn.Module) -> int:
    """Return the bytes of the parameters and buffers of ``module``; shared ones count once."""
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))
