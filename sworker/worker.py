"""The S-worker: all of the model but its attention, from a scheduled step to sampled tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from fastdecode.clock import HOST, MODEL, StateClock
from fastdecode.protocols import AttentionBackend
from fastdecode.sworker.forward import MiniBatchForward
from fastdecode.sworker.packing import pack
from fastdecode.sworker.pipeline import Pipeline
from fastdecode.sworker.prefill import PromptScratch
from fastdecode.sworker.sampling import SampledToken, Sampler, SamplingRow
from fastdecode.types import Chunk, KVLayout, ScheduledStep


class SWorker:
    """Owns the model, the prompt scratch and the pipeline."""

    def __init__(self, model: torch.nn.Module, layout: KVLayout, backend: AttentionBackend, clock: StateClock) -> None:
        self.model = model
        self.layout = layout
        self.backend = backend
        self.clock = clock
        self.scratch = PromptScratch()
        self.device = next(model.parameters()).device
        self._pipeline = Pipeline(backend, clock)
        self._sampler = Sampler()

    def run(
        self, step: ScheduledStep, sampling: Mapping[int, Sequence[SamplingRow]], overlap: bool = True
    ) -> dict[int, list[SampledToken]]:
        """Compute ``step`` and sample: for each sequence in ``sampling`` one token per sampling row.

        A prompt that grows into several sequences has several rows over the same logits. The backend's step must
        have begun.
        """
        with torch.inference_mode():
            forwards = self._forwards(step)
            logits = self._pipeline.run(forwards, overlap)
            self.clock.enter(MODEL)
            tokens = self._sample([chunks for chunks in step.mini_batches if chunks], logits, sampling)
        self.clock.enter(HOST)
        self._forget_finished_prompts(step)
        return tokens

    def forget(self, sequence_id: int) -> None:
        """Free the scratch of a sequence that was aborted in its prompt."""
        self.scratch.forget(sequence_id)

    def _forwards(self, step: ScheduledStep) -> list[MiniBatchForward]:
        return [
            MiniBatchForward(mini_batch, pack(chunks, self.device), self.model, self.layout, self.backend, self.scratch)
            for mini_batch, chunks in enumerate(step.mini_batches)
            if chunks
        ]

    def _sample(
        self,
        mini_batches: Sequence[Sequence[Chunk]],
        logits: Sequence[torch.Tensor],
        sampling: Mapping[int, Sequence[SamplingRow]],
    ) -> dict[int, list[SampledToken]]:
        ids = [chunk.sequence_id for chunks in mini_batches for chunk in chunks if chunk.samples]
        if not ids:
            return {}
        rows = [row for sequence_id in ids for row in sampling[sequence_id]]
        all_logits = torch.cat(list(logits))
        if len(rows) != len(ids):
            counts = torch.tensor([len(sampling[sequence_id]) for sequence_id in ids], device=self.device)
            all_logits = all_logits.repeat_interleave(counts, dim=0)
        sampled = iter(self._sampler.sample(all_logits, rows))
        return {sequence_id: [next(sampled) for _ in sampling[sequence_id]] for sequence_id in ids}

    def _forget_finished_prompts(self, step: ScheduledStep) -> None:
        for chunks in step.mini_batches:
            for chunk in chunks:
                if chunk.last_of_prompt and not chunk.is_decode:
                    self.scratch.forget(chunk.sequence_id)
