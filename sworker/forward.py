"""One mini-batch's way through the model: what happens each time a layer asks for attention."""

from __future__ import annotations

from typing import Any

import torch

from fastdecode.core.protocols import AttentionBackend
from fastdecode.sworker.greenlets import ModelGreenlet
from fastdecode.sworker.packing import PackedRows
from fastdecode.sworker.prompts import PromptAttention
from fastdecode.sworker.staging import HostStaging, Staging, rows_of


class MiniBatchForward:
    """A forward of the model over packed rows, in a greenlet of its own; it pauses at every attention call."""

    def __init__(
        self,
        mini_batch: int,
        packed: PackedRows,
        model: torch.nn.Module,
        backend: AttentionBackend,
        prompts: PromptAttention,
        staging: Staging | None = None,
    ) -> None:
        """``staging`` is the pipeline's own; by default that of a model on the CPU."""
        self.mini_batch = mini_batch
        self.packed = packed
        self.layer = 0
        self.own_greenlet = ModelGreenlet(self._run, self._attend)
        self._model = model
        self._staging = staging or HostStaging(backend)
        self._prompts = prompts

    def _run(self) -> torch.Tensor:
        """Logits of the sampling rows, [num_sampled, vocab], in the model's dtype."""
        packed = self.packed
        output = self._model(
            input_ids=packed.input_ids,
            position_ids=packed.position_ids,
            use_cache=False,
            logits_to_keep=packed.logits_rows,
        )
        return output.logits[0, : packed.num_sampled]

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        **kwargs: Any,
    ) -> torch.Tensor:
        """Send, attend prompt chunks meanwhile, leave to the pipeline, come back with o [1, T, heads, dim]."""
        num_rows = self.packed.num_rows
        q, k, v = rows_of(query), rows_of(key)[:num_rows], rows_of(value)[:num_rows]
        self._staging.send(self.mini_batch, self.layer, q[self.packed.attending_rows], k, v)
        prompts = self._prompts.attend(self.layer, self.mini_batch, q, k, v, self.packed.prompt_rows)
        self.layer += 1
        remote: torch.Tensor = self.own_greenlet.parent.switch()
        return self._assemble(remote.view(q.dtype), prompts, len(q))

    def _assemble(self, remote: torch.Tensor, prompts: list[torch.Tensor], num_padded_rows: int) -> torch.Tensor:
        """All rows of o in packed order; rows of padding are zero."""
        if len(remote) == num_padded_rows:
            return remote[None]
        o = remote.new_zeros((num_padded_rows, *remote.shape[1:]))
        o[self.packed.attending_rows] = remote
        for rows, prompt in zip(self.packed.prompt_rows, prompts, strict=True):
            o[rows.rows] = prompt
        return o[None]
