"""The seam between the S-worker and a model's code: what runs between two attention calls, whoever wrote it.

transformers' code is the default, and what others are compared with. An implementation loads a checkpoint, runs packed
rows inside a ``ModelGreenlet``, and hands every attention call to that greenlet's ``attend`` with the arguments of
transformers' attention functions. The probe reads the layout of each layer off these calls.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from fastdecode.kinds.layout import KVLayout


class ModelCode(Protocol):
    """All of a loaded model but its attention."""

    module: torch.nn.Module
    least_rows: int
    """Rows that forwards are padded to, so that a row gets the same bits in each of them."""

    @property
    def device(self) -> torch.device:
        """The device of the dense layers."""

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights as they were loaded, shared ones once."""

    @property
    def num_parameters(self) -> int:
        """Parameters, tied ones once; of packed weights as they are packed."""

    def logits(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, rows: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return logits [len(rows), vocab_size] of tokens int64 [1, T] at positions int64 [1, T].

        ``rows``: int64, all by default. Runs inside a ``ModelGreenlet``, which answers each attention call.
        """

    def of(self, module: torch.nn.Module) -> ModelCode:
        """Return the code of ``module``, a part of this model that shares its weights."""


@dataclass(frozen=True)
class LoadedCode:
    """A model's code as it was loaded: ``whole_layout`` is that of all ranks, ``digest`` tells checkpoints apart."""

    code: ModelCode
    layout: KVLayout
    whole_layout: KVLayout
    digest: str


def bytes_of(module: torch.nn.Module) -> int:
    """Return the memory of parameters and buffers, shared ones once."""
    return sum(each.numel() * each.element_size() for each in (*module.parameters(), *module.buffers()))
