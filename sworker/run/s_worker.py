"""The S-worker: from a scheduled step to sampled tokens, with all of the model but attention."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from fastdecode.core.metrics import HOST, MODEL, WAIT, StateClock
from fastdecode.core.optional import optional
from fastdecode.core.protocols import AttentionBackend
from fastdecode.core.step import ScheduledStep
from fastdecode.kinds.layout import KVLayout
from fastdecode.sworker.model.code import ModelCode
from fastdecode.sworker.run.pipeline import Forward, Graphs, MiniBatchForward, Pipeline
from fastdecode.sworker.run.prompt_scratch import PromptScratch
from fastdecode.sworker.run.prompts import PromptAttention
from fastdecode.sworker.run.staging import (
    TORCH_DTYPE,
    HostStaging,
    PackedRows,
    QueryTaps,
    Staging,
    from_numpy,
    pack,
    to_device,
)
from fastdecode.sworker.run.threads import SharedCores
from fastdecode.sworker.sampling import SampledToken, Sampler, SamplingRow
from fastdecode.sworker.sampling.prompt_scores import PromptScores, ScoredPrompt, score_prompts

Lead = Callable[[ScheduledStep, bool], contextlib.AbstractContextManager[None]]
"""A function that lets other ranks compute a step, with or without overlap, within the returned context."""


class SWorker:
    """Runs the model for scheduled steps, by the pipeline or by CUDA graphs, and samples tokens.

    ``taps``: queries of the last step, kept because a request asked which tokens they attended to.
    """

    def __init__(
        self,
        code: ModelCode,
        layout: KVLayout,
        backend: AttentionBackend,
        clock: StateClock,
        cores: SharedCores | None = None,
        prompts: PromptAttention | None = None,
        lead: Lead | None = None,
        in_order: bool = False,
    ) -> None:
        """Keep the arguments and make staging and pipeline.

        ``cores``: a ``SharedCores`` of another S-worker of this process, if the two take turns. ``prompts``: computes
        attention of prompts on the S-worker; by default torch does. ``lead``: lets the other ranks compute a step too.
        ``in_order``: see ``Pipeline``.
        """
        self.code = code
        self.layout = layout
        self.backend = backend
        self.clock = clock
        self.prompts = prompts or PromptScratch(layout)
        self.device = code.device
        self.staging = make_staging(backend, self.device)
        self._cores = (cores or SharedCores()) if self.device.type == "cpu" else None
        self.pipeline = Pipeline(backend, clock, self.staging, self._cores, in_order)
        self._lead = lead
        self._sampler = Sampler()
        self.prompt_scores: dict[int, PromptScores] = {}
        self.graphs: Graphs | None = None
        self.taps = QueryTaps((), self.device)

    def beside(self, code: ModelCode, layout: KVLayout, backend: AttentionBackend, lead: Lead | None = None) -> SWorker:
        """Return an S-worker for another model, such as a draft model, which runs between this one's steps.

        Both use the same threads and clock. ``lead``: lets the other ranks compute a step of the other model too.
        """
        return SWorker(code, layout, backend, self.clock, self._cores, lead=lead, in_order=self.pipeline.in_order)

    def capture_graphs(self, num_mini_batches: int, max_num_seqs: int) -> None:
        """Capture CUDA graphs for decodes, and use them from now on, if the model runs on a GPU and can be captured."""
        recorder = make_recorder(self.device)
        if recorder is not None:
            max_rows = -(-max_num_seqs // num_mini_batches)
            self.graphs = optional("CUDA graphs").ModelGraphs(self.code, recorder, num_mini_batches, max_rows)

    def run(
        self,
        step: ScheduledStep,
        sampling: Mapping[int, Sequence[SamplingRow]],
        overlap: bool = True,
        arrived: Mapping[int, np.ndarray] = MappingProxyType({}),
        scored: Mapping[int, ScoredPrompt] = MappingProxyType({}),
    ) -> dict[int, list[SampledToken]]:
        """Compute ``step`` and sample: one token per sampling row, for each sequence in ``sampling``.

        If a prompt grows into several sequences, each has a sampling row for the same logits. A sequence with draft
        tokens has a sampling row for each of its logits, the next token's first. ``arrived``: logits of prompts that
        prefill workers have computed, [vocab_size] in the model's dtype, to be sampled too. ``scored``: prompts whose
        log-probabilities were requested; ``prompt_scores`` returns them. The backend's step must have begun.
        """
        before = dict(self.clock.seconds)
        with torch.inference_mode():
            forwards = self.forwards(step)
            logits = self._run(step, forwards, overlap)
            self.clock.enter(MODEL)
            self.staging.mark()
            self.prompt_scores = {}
            if scored:
                logits, self.prompt_scores = score_prompts(step.mini_batches, logits, scored)
            counts = {each: n for part in step.mini_batches for each, n in part.num_logits.items()}
            counts |= dict.fromkeys(arrived, 1)
            tokens = self._sample(counts, [*logits, *map(self._own, arrived.values())], sampling)
            self.staging.mark()
            device_seconds = self.staging.device_seconds()
        self.clock.enter(HOST)
        if device_seconds is not None:
            self._count_device_time(before, device_seconds)
        self._forget_finished_prompts(step)
        return tokens

    def follow(self, step: ScheduledStep, overlap: bool) -> None:
        """Compute this rank's part of ``step``; only rank 0 samples."""
        with torch.inference_mode():
            self._run_here(step, self.forwards(step), overlap)
        self._forget_finished_prompts(step)

    def score(self, step: ScheduledStep) -> torch.Tensor:
        """Return log-probabilities of the tokens in the step's single chunk, except the first: float32 [tokens - 1]."""
        (mini_batch,) = step.mini_batches
        with torch.inference_mode():
            (logits,) = self._run(step, self.forwards(step))
            targets = to_device(mini_batch.token_ids[1:], self.device)
            return logits[:-1].float().log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu()

    def forget(self, sequence_id: int) -> None:
        """Free the keys and values kept for sequence ``sequence_id``, which was aborted during its prompt."""
        self.prompts.forget(sequence_id)

    def _run(self, step: ScheduledStep, forwards: Sequence[Forward], overlap: bool = True) -> list[torch.Tensor]:
        with self._lead(step, overlap) if self._lead else contextlib.nullcontext():
            return self._run_here(step, forwards, overlap)

    def _run_here(self, step: ScheduledStep, forwards: Sequence[Forward], overlap: bool) -> list[torch.Tensor]:
        if step.is_decode:
            return self.pipeline.run(forwards, overlap)
        try:
            self.prompts.begin_step(step.mini_batches)
            logits = self.pipeline.run(forwards, overlap)
        except BaseException:
            self.prompts.abandon_step()
            raise
        self.prompts.end_step()
        return logits

    def forwards(self, step: ScheduledStep) -> list[Forward]:
        """Return the forwards of ``step``, one per mini-batch with rows."""
        mini_batches, rows = enumerate(step.mini_batches), self.code.least_rows
        self.taps = taps = QueryTaps(step.taps, self.device)
        return [
            self._forward(mini_batch, replace(pack(chunks, self.device, rows), tap=taps[mini_batch]))
            for mini_batch, chunks in mini_batches
            if chunks
        ]

    def _forward(self, mini_batch: int, packed: PackedRows) -> Forward:
        """Return a forward that replays CUDA graphs if they fit, else one that runs the model's own code."""
        captured = self.graphs and self.graphs.forward(mini_batch, packed, self.staging)
        return captured or MiniBatchForward(mini_batch, packed, self.code, self.backend, self.prompts, self.staging)

    def _sample(
        self,
        num_logits: Mapping[int, int],
        logits: Sequence[torch.Tensor],
        sampling: Mapping[int, Sequence[SamplingRow]],
    ) -> dict[int, list[SampledToken]]:
        """Return the sampled tokens by sequence.

        ``logits``: tensors [rows, vocab_size]. ``num_logits``: each sequence's number of rows, in the rows' order.
        """
        if not num_logits:
            return {}
        rows = [row for sequence_id in num_logits for row in sampling[sequence_id]]
        all_logits = torch.cat(list(logits)) if len(logits) > 1 else logits[0]
        if len(rows) != len(all_logits):
            starts = itertools.accumulate(num_logits.values(), initial=0)
            origins = [
                start + min(place, count - 1)
                for start, (sequence_id, count) in zip(starts, num_logits.items(), strict=False)
                for place in range(len(sampling[sequence_id]))
            ]
            all_logits = all_logits.index_select(0, to_device(origins, self.device))
        tokens = self._sampler.sample(all_logits, rows)
        if len(rows) == len(num_logits):
            return {sequence_id: [token] for sequence_id, token in zip(num_logits, tokens, strict=True)}
        sampled = iter(tokens)
        return {sequence_id: [next(sampled) for _ in sampling[sequence_id]] for sequence_id in num_logits}

    def _own(self, logits: np.ndarray) -> torch.Tensor:
        return from_numpy(logits, TORCH_DTYPE[self.layout.model_dtype])[None].to(self.device)

    def _count_device_time(self, before: Mapping[str, float], device_seconds: float) -> None:
        """Count the GPU's compute time as model time, and the remaining time since ``before`` as waiting.

        This thread's own times say little: it mostly queues work that the GPU computes later.
        """
        seconds = self.clock.seconds
        spent = sum(seconds[state] - before[state] for state in (MODEL, WAIT))
        model = min(device_seconds, spent)
        seconds[MODEL], seconds[WAIT] = before[MODEL] + model, before[WAIT] + spent - model

    def _forget_finished_prompts(self, step: ScheduledStep) -> None:
        for mini_batch in step.mini_batches:
            prompts = mini_batch.prompts
            for sequence_id in prompts["sequence_id"][prompts["last_of_prompt"]].tolist():
                self.prompts.forget(sequence_id)


def make_staging(backend: AttentionBackend, device: torch.device) -> Staging:
    if device.type != "cuda":
        return HostStaging(backend)
    cuda = optional("CUDA staging")
    return cuda.CudaStaging(backend, cuda.CudaDevice(device))


def make_recorder(device: torch.device) -> Any:
    """Return the ``GraphRecorder`` of CUDA graphs for a model on ``device``; None for the CPU."""
    return optional("CUDA graphs").GraphRecorder(device) if device.type == "cuda" else None
