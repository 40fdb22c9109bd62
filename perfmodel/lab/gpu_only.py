"""The alternative to every plan, the same GPU with the KV cache in its own memory, and which of the two to take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel import equations
from fastdecode.perfmodel.equations import largest
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.rank_costs import ALONE, RankGroup, replicated_bytes
from fastdecode.perfmodel.sizing import Plan, Prices, Workload

MEMORY_FRACTION = 0.9
"""The part of a GPU's memory for weights and cache; the rest is activations and the driver (vLLM's default)."""

MARGIN = 1.2
"""Ratios of throughput below this are within the error of figures that were not measured on the machine at hand."""


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU's memory for weights and cache."""
    return MEMORY_FRACTION * gpu.memory_bytes


def held_bytes(shape: ModelShape, group: RankGroup) -> int:
    """Return the bytes of weights on all ranks together."""
    return shape.weight_bytes + replicated_bytes(shape, group.size)


def check_weights(shape: ModelShape, gpu: Gpu, group: RankGroup = ALONE) -> None:
    """PlanError, by how much, where the weights do not fit the GPU, or the GPUs of ``group`` taken as one."""
    weights = held_bytes(shape, group)
    lacking = weights - usable_bytes(gpu)
    if lacking > 0:
        raise PlanError(
            f"{shape.name} has {weights / 1e9:.1f} GB of {shape.dtype} weights, and "
            f"{gpu.name} has room for {usable_bytes(gpu) / 1e9:.1f} GB: {lacking / 1e9:.1f} GB too little "
            f"(--tensor-parallel-size takes more GPUs)"
        )


@dataclass(frozen=True)
class GpuOnly:
    """The best the GPU does alone; ``max_batch_size`` 0 and no throughput where not one sequence can run."""

    max_batch_size: int
    output_tokens_per_second: float
    step_seconds: float | None
    limited_by: str


@dataclass(frozen=True)
class GpuStepTime:
    """Any step of a GPU that holds the cache itself, at the roofline: answers ``StepTime(tokens, kv_tokens)``.

    Attention is the reading of its keys and values, once per step and sequence, and adds to the rest, as the
    collectives of ``group`` do, whose GPUs ``gpu`` is taken as one. A step reads ``read_share`` of the cache, and
    reads and writes the states of the sequences that it samples.
    """

    shape: ModelShape
    gpu: Gpu
    kv_bytes_per_token: float
    group: RankGroup = ALONE
    read_share: float = 1.0

    def __call__(self, tokens: float, kv_tokens: float, output_tokens: float | None = None) -> float:
        """Seconds of a step that computes ``tokens`` rows and attends over ``kv_tokens``.

        Only the rows that are sampled, ``output_tokens``, meet the head; all rows unless given.
        """
        unsampled = 0.0 if output_tokens is None else tokens - output_tokens
        states = 2.0 * self.shape.state_bytes_per_sequence * (tokens - unsampled)
        own = equations.roofline_step_seconds(
            1,
            kv_tokens * self.read_share * self.kv_bytes_per_token + states,
            tokens * self.shape.active_parameters - unsampled * self.shape.head_parameters,
            self.shape.weight_bytes,
            self.gpu.flops_per_second.achieved,
            self.gpu.kv_bytes_per_second.achieved,
        )
        return own + collective_seconds(self.shape, self.group, tokens, tokens - unsampled)

    @property
    def capacity_tokens(self) -> int:
        """Cached tokens that fit beside the weights; 0 where not even those do."""
        return equations.roofline_max_batch_size(
            usable_bytes(self.gpu), held_bytes(self.shape, self.group), self.kv_bytes_per_token
        )


def collective_seconds(shape: ModelShape, group: RankGroup, rows: float, sampled_rows: float) -> float:
    """Return the seconds of the collectives of one step."""
    return shape.num_layers * group.layer_seconds(shape, rows) + group.head_seconds(shape, sampled_rows)


@dataclass(frozen=True)
class GpuServer:
    """A model on a GPU without R-workers, its batch filled to the last byte and its kernels at the roofline.

    Kinder to it than any real server, so that what is said for FastDecode holds. ``read_share``: part of the cache that
    a step reads.
    """

    shape: ModelShape
    gpu: Gpu
    kv_bytes_per_token: float
    workload: Workload
    group: RankGroup = ALONE
    read_share: float = 1.0

    def check_weights(self) -> None:
        """PlanError, by how much, where the weights do not fit the GPU: then neither way can run."""
        check_weights(self.shape, self.gpu, self.group)

    def step_seconds(self, batch_size: int) -> float:
        """Return the seconds of a decode step at the achieved rates, the prompts' share of rows included."""
        bytes_per_second = self.gpu.kv_bytes_per_second.achieved
        own = equations.roofline_step_seconds(
            batch_size,
            self.read_share * self._own_kv_bytes + 2.0 * self.shape.state_bytes_per_sequence,
            self.shape.active_parameters * self.workload.rows_per_output_token,
            self.shape.weight_bytes,
            self.gpu.flops_per_second.achieved,
            bytes_per_second,
        )
        rows = batch_size * self.workload.rows_per_output_token
        collectives = collective_seconds(self.shape, self.group, rows, batch_size)
        return own + self.read_share * self._shared_kv_bytes / bytes_per_second + collectives

    def best(self, latency_limit_seconds: float = math.inf) -> GpuOnly:
        """The largest batch that memory and the limit on a whole sequence allow; throughput only rises with it."""
        weights = held_bytes(self.shape, self.group) + self._shared_kv_bytes
        of_each = self._own_kv_bytes + self.shape.state_bytes_per_sequence
        by_memory = equations.roofline_max_batch_size(usable_bytes(self.gpu), weights, of_each)
        limit = latency_limit_seconds / self.workload.output_len
        batch = largest(lambda size: self.step_seconds(size) <= limit, by_memory) if limit < math.inf else by_memory
        limited_by = "memory" if batch == by_memory else "latency limit"
        if batch == 0:
            return GpuOnly(0, 0.0, None, limited_by)
        seconds = self.step_seconds(batch)
        return GpuOnly(batch, batch / seconds, seconds, limited_by)

    @property
    def _own_kv_bytes(self) -> float:
        """Bytes of the mean sequence's cache, apart from the prefix that all share."""
        return (self.workload.mean_context - self.workload.shared_prefix_len) * self.kv_bytes_per_token

    @property
    def _shared_kv_bytes(self) -> float:
        return self.workload.shared_prefix_len * self.kv_bytes_per_token


@dataclass(frozen=True)
class Verdict:
    """``use_fastdecode`` is None where nothing is known of the GPU alone; ``sentence`` says it in words."""

    use_fastdecode: bool | None
    sentence: str


def judge(plan: Plan, alone: GpuOnly | None, prices: Prices) -> Verdict:
    """Judge by throughput, and by the price of a token where prices are known."""
    if alone is None:
        return Verdict(None, "The GPU alone was not compared: name it with --gpu.")
    rate, alone_rate = plan.output_tokens_per_second, alone.output_tokens_per_second
    if alone.max_batch_size == 0:
        return Verdict(True, f"The GPU alone cannot run one such sequence (its {alone.limited_by} is too small).")
    beside = f"{rate:.0f} tokens/s against {alone_rate:.0f} of the GPU alone with a batch of {alone.max_batch_size}"
    if rate <= alone_rate:
        return Verdict(False, f"Do not use FastDecode here: {beside}.")
    price, alone_price = plan.price_per_million_tokens, prices.per_million_tokens(0, alone_rate)
    if price is not None and alone_price is not None:
        beside += f"; {price:.3g} against {alone_price:.3g} per million tokens"
        if price >= alone_price:
            return Verdict(False, f"Do not use FastDecode here, unless for speed at any price: {beside}.")
    if rate < MARGIN * alone_rate:
        return Verdict(
            False, f"Do not use FastDecode here on these figures alone, the gain is within their error: {beside}."
        )
    return Verdict(True, f"FastDecode gives {rate / alone_rate:.1f} times the throughput: {beside}.")
