"""The alternative to FastDecode: the same GPU without R-workers, with the KV cache in its own memory."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fastdecode.core.errors import PlanError
from fastdecode.perfmodel import equations
from fastdecode.perfmodel.equations import largest
from fastdecode.perfmodel.hardware import Gpu
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.rank_costs import ALONE, RankGroup, gpu_peer_link, replicated_bytes
from fastdecode.perfmodel.service import NO_LIMITS, Service, ServiceLimits, prompt_chunks, prompt_pairs
from fastdecode.perfmodel.sizing import Workload


def usable_bytes(gpu: Gpu) -> float:
    """Return the bytes of a GPU's memory for weights and cache."""
    # Part of a GPU's memory for weights and cache; the rest is for activations and the driver (vLLM's default)
    memory_fraction = 0.9
    return memory_fraction * gpu.memory_bytes


def held_bytes(shape: ModelShape, group: RankGroup) -> int:
    """Return the bytes of weights on all ranks together."""
    return shape.weight_bytes + replicated_bytes(shape, group.size)


def check_weights(shape: ModelShape, gpu: Gpu, group: RankGroup = ALONE) -> None:
    """Raise PlanError, with the shortage, if the weights do not fit the GPU, or the summed memory of ``group``."""
    weights = held_bytes(shape, group)
    lacking = weights - usable_bytes(gpu)
    if lacking > 0:
        raise PlanError(
            f"{shape.name} has {weights / 1e9:.1f} GB of {shape.dtype} weights, and "
            f"{gpu.name} has room for {usable_bytes(gpu) / 1e9:.1f} GB: {lacking / 1e9:.1f} GB too little "
            f"(needs {fewest_gpus(shape, gpu, group) or 'more than 64'} of its kind: --tensor-parallel-size)"
        )


def fewest_gpus(shape: ModelShape, gpu: Gpu, group: RankGroup = ALONE) -> int | None:
    """Return the fewest GPUs, a power of two, that hold the weights; None if 64 do not.

    ``gpu`` has the summed figures of all GPUs of ``group``.
    """
    one, link = usable_bytes(gpu) / group.size, group.link or gpu_peer_link(gpu)
    count = 1
    most_gpus = 64
    while count <= most_gpus:
        if held_bytes(shape, RankGroup(count, link)) <= count * one:
            return count
        count *= 2
    return None


@dataclass(frozen=True)
class GpuOnly:
    """The best result of the GPU alone. ``max_batch_size`` is 0, without throughput, if no sequence can run.
    ``limited_by``: what bounds the batch: "memory", "latency limit", or "time per token". ``ttft_seconds``: time to
    first token of a request that starts at once, while no other prompt is computed. ``lone_step_seconds``: time per
    token of a single user, given only if the memory suffices but even this time exceeds the limit.
    """

    max_batch_size: int
    output_tokens_per_second: float
    step_seconds: float | None
    limited_by: str
    ttft_seconds: float | None = None
    lone_step_seconds: float | None = None

    def service(self, price_per_million_tokens: float | None = None) -> Service | None:
        """Return batch size, throughput and latencies as a ``Service``; None if no sequence can run."""
        if self.step_seconds is None or self.ttft_seconds is None:
            return None
        return Service(
            self.max_batch_size, self.output_tokens_per_second, self.step_seconds, self.ttft_seconds,
            price_per_million_tokens,
        )  # fmt: skip


@dataclass(frozen=True)
class GpuStepTime:
    """Computes the seconds of any step of a GPU that holds the cache itself, at the roofline (a ``StepTime``).
    The seconds are the sum of weights or matrix products, of attention, and of collectives in ``group``. ``gpu`` stands
    for all GPUs of ``group`` together. Attention reads ``read_share`` of the cached keys and values once per step and
    sequence. A step also reads and writes the states of sampled sequences.
    """

    shape: ModelShape
    gpu: Gpu
    kv_bytes_per_token: float
    group: RankGroup = ALONE
    read_share: float = 1.0

    def __call__(self, tokens: float, kv_tokens: float, output_tokens: float | None = None) -> float:
        """Return the seconds of a step that computes ``tokens`` rows and attends over ``kv_tokens``.

        ``output_tokens``: sampled rows, which alone use the head; all rows by default.
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
        """Cached tokens that fit beside the weights; 0 if the weights alone do not fit."""
        return equations.roofline_max_batch_size(
            usable_bytes(self.gpu), held_bytes(self.shape, self.group), self.kv_bytes_per_token
        )


def pair_seconds(shape: ModelShape, gpu: Gpu) -> float:
    """Return the seconds of one (query, key) pair of a prompt on ``gpu``, over all attending layers.

    A pair takes the multiply-adds of one score and of adding one value. If linear layers multiply int8, the rate of
    ``gpu`` is that of int8, and attention has half of it. Sliding windows and indexes are ignored.
    """
    layer = shape.layer_layout
    operations = 2.0 * layer.num_heads * (layer.key_head_dim + layer.value_head_dim) * shape.attention_layers
    return (2.0 if shape.multiplies_int8 else 1.0) * operations / gpu.flops_per_second.achieved


def collective_seconds(shape: ModelShape, group: RankGroup, rows: float, sampled_rows: float) -> float:
    """Return the seconds of the collectives of one step."""
    return shape.num_layers * group.layer_seconds(shape, rows) + group.head_seconds(shape, sampled_rows)


@dataclass(frozen=True)
class GpuServer:
    """A model on a GPU without R-workers, with its whole memory in use and kernels at the roofline.

    No real server is as fast, so comparisons never favour FastDecode. ``read_share``: fraction of the cache that a step
    reads.
    """

    shape: ModelShape
    gpu: Gpu
    kv_bytes_per_token: float
    workload: Workload
    group: RankGroup = ALONE
    read_share: float = 1.0

    def check_weights(self) -> None:
        """Raise PlanError, with the shortage, if the weights do not fit the GPU. FastDecode needs them there too."""
        check_weights(self.shape, self.gpu, self.group)

    def step_seconds(self, batch_size: int, more_rows: float = 0.0) -> float:
        """Return the seconds of a decode step at the achieved rates, including the mean number of prompt rows per step.
        ``more_rows``: a number of prompt rows to use instead of the mean.
        """
        bytes_per_second = self.gpu.kv_bytes_per_second.achieved
        rows = batch_size + more_rows if more_rows else batch_size * self.workload.rows_per_output_token
        own = equations.roofline_step_seconds(
            batch_size,
            self.read_share * self.own_kv_bytes + 2.0 * self.shape.state_bytes_per_sequence,
            self.shape.active_parameters * rows / batch_size,
            self.shape.weight_bytes,
            self.gpu.flops_per_second.achieved,
            bytes_per_second,
        )
        collectives = collective_seconds(self.shape, self.group, rows, batch_size)
        return own + self.read_share * self._shared_kv_bytes / bytes_per_second + collectives

    def first_token_seconds(self, batch_size: int) -> float:
        """Return a request's time to first token without waiting, while ``batch_size`` sequences decode."""
        tokens = self.workload.prompt_len - self.workload.shared_prefix_len
        steps = (count * self.step_seconds(batch_size, rows) for count, rows in prompt_chunks(tokens))
        return sum(steps) + self.pair_seconds * prompt_pairs(tokens, self.workload.shared_prefix_len)

    def best(self, latency_limit_seconds: float = math.inf, limits: ServiceLimits = NO_LIMITS) -> GpuOnly:
        """Return the result of the largest batch within memory and all limits, which has the highest throughput."""
        by_memory = self.most_sequences
        limit = latency_limit_seconds / self.workload.output_len

        def keeps(size: int) -> bool:
            seconds = self.step_seconds(size)
            return seconds <= limit and limits.kept_by(seconds, self.first_token_seconds(size))

        free = limit == math.inf and limits == NO_LIMITS
        batch = by_memory if free else largest(keeps, by_memory)
        cause = "latency limit" if limit < limits.tpot_seconds else "time per token"
        limited_by = "memory" if batch == by_memory else cause
        if batch == 0:
            return GpuOnly(0, 0.0, None, limited_by, lone_step_seconds=self.step_seconds(1) if by_memory else None)
        seconds = self.step_seconds(batch)
        return GpuOnly(batch, batch / seconds, seconds, limited_by, self.first_token_seconds(batch))

    @property
    def most_sequences(self) -> int:
        """Number of sequences of mean length that fit the memory beside the weights."""
        weights = held_bytes(self.shape, self.group) + self._shared_kv_bytes
        of_each = self.own_kv_bytes + self.shape.state_bytes_per_sequence
        return equations.roofline_max_batch_size(usable_bytes(self.gpu), weights, of_each)

    @property
    def pair_seconds(self) -> float:
        """Seconds of a (query, key) pair of a prompt, over all layers."""
        return pair_seconds(self.shape, self.gpu)

    @property
    def own_kv_bytes(self) -> float:
        """Bytes of the mean sequence's cache without the shared prefix."""
        return (self.workload.mean_context - self.workload.shared_prefix_len) * self.kv_bytes_per_token

    @property
    def _shared_kv_bytes(self) -> float:
        return self.workload.shared_prefix_len * self.kv_bytes_per_token
