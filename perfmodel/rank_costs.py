"""An S-worker of several tensor-parallel ranks: one rank's share of work and memory, and the cost of collectives."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.perfmodel.hardware import Figure, Gpu
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.stages import SPart

PEER_EFFICIENCY = 0.7
"""Fraction of a link's nominal rate that all-reduces of megabytes reach; assumed, since no paper here gives one."""

NVLINK_STEP_SECONDS, PCIE_STEP_SECONDS, NETWORK_STEP_SECONDS = 5e-6, 10e-6, 25e-6
"""Seconds of one message between two ranks, with the collective's launch; assumed."""


@dataclass(frozen=True)
class PeerLink:
    """The link between ranks.

    ``bytes_per_second``: rate at which each rank sends and, at the same time, receives. ``step_seconds``: of an empty
    message.
    """

    name: str
    bytes_per_second: Figure
    step_seconds: float

    def __post_init__(self) -> None:
        if not 0 <= self.step_seconds < math.inf:
            raise ConfigError(f"a message between ranks takes a finite time, not {self.step_seconds!r} seconds")


@dataclass(frozen=True)
class RankGroup:
    """``size`` ranks, all connected to each other by ``link`` (None for one rank)."""

    size: int = 1
    link: PeerLink | None = None

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ConfigError(f"tensor_parallel_size must be at least 1, not {self.size}")
        if self.size > 1 and self.link is None:
            raise ConfigError(f"{self.size} ranks need a link between them")

    def all_reduce_seconds(self, num_bytes: float) -> float:
        """Return the seconds to sum a tensor of ``num_bytes`` over all ranks: the faster of two algorithms.

        A ring takes 2·(N - 1) messages of a share of the tensor (least bytes). Recursive doubling takes log2(N)
        messages of the whole tensor (fewest messages).
        """
        if self.link is None or self.size == 1:
            return 0.0
        rate, once = self.link.bytes_per_second.achieved, self.link.step_seconds
        ring = 2 * (self.size - 1) * (once + num_bytes / self.size / rate)
        return min(ring, math.ceil(math.log2(self.size)) * (once + num_bytes / rate))

    def gather_seconds(self, num_bytes: float) -> float:
        """Return the seconds to gather a tensor of ``num_bytes``, of which every rank has a share, on every rank."""
        if self.link is None or self.size == 1:
            return 0.0
        each = num_bytes / self.size / self.link.bytes_per_second.achieved
        return (self.size - 1) * (self.link.step_seconds + each)

    def layer_seconds(self, shape: ModelShape, rows: float) -> float:
        """Return the seconds of the collectives in one layer of ``shape``, the whole model."""
        # All-reduces of [rows, hidden_size]: after attention's output projection, and after the MLP's last matrix
        all_reduces_per_layer = 2
        return all_reduces_per_layer * self.all_reduce_seconds(rows * shape.hidden_size * shape.item_bytes)

    def head_seconds(self, shape: ModelShape, rows: float) -> float:
        """Return the seconds to gather the logits of ``rows`` rows from all ranks."""
        return self.gather_seconds(rows * shape.vocab_size * shape.item_bytes)


ALONE = RankGroup()


@dataclass(frozen=True)
class RankSPart:
    """The S-part under tensor parallelism. ``rank``: one rank's own work; ``shape``: the whole model."""

    rank: SPart
    shape: ModelShape
    group: RankGroup

    def layer_seconds(self, rows: float) -> float:
        """Return the seconds of one layer for ``rows`` rows: a rank's products and the all-reduces."""
        return self.rank.layer_seconds(rows) + self.group.layer_seconds(self.shape, rows)

    def head_seconds(self, rows: float) -> float:
        """Return the seconds to compute a rank's share of the logits of ``rows`` rows and to gather all shares."""
        return self.rank.head_seconds(rows) + self.group.head_seconds(self.shape, rows)


def rank_shape(shape: ModelShape, num_ranks: int) -> ModelShape:
    """Return the part of ``shape`` on one of ``num_ranks`` ranks: heads, MLP widths and the vocabulary are divided.

    If there are fewer KV heads than ranks, several ranks have the same KV head. Every rank has whole latent rows, which
    all heads share, the projections to latents, and whole recurrent layers. Raise PlanError if heads cannot be divided
    evenly.
    """
    if num_ranks == 1:
        return shape
    kv_heads = shape.num_kv_heads
    if shape.num_heads % num_ranks or (kv_heads % num_ranks and num_ranks % kv_heads):
        raise PlanError(
            f"tensor_parallel_size: {num_ranks} ranks cannot share the {shape.num_heads} heads and {kv_heads} KV heads "
            f"of {shape.name} evenly"
        )
    return replace(
        shape,
        num_heads=shape.num_heads // num_ranks,
        num_kv_heads=max(1, kv_heads // num_ranks),
        intermediate_size=math.ceil(shape.intermediate_size / num_ranks),
        shared_intermediate_size=math.ceil(shape.shared_intermediate_size / num_ranks),
        dense_intermediate_size=math.ceil(shape.dense_intermediate_size / num_ranks),
        vocab_size=math.ceil(shape.vocab_size / num_ranks),
    )


def replicated_bytes(shape: ModelShape, num_ranks: int) -> int:
    """Return the bytes of weights that every rank after the first repeats.

    They are the input embedding, which transformers' tensor-parallel plans do not split, the projections to latents,
    and an index that picks single tokens.
    """
    whole = shape.head_parameters
    if shape.latent:
        whole += shape.attention_layers * shape.latent.shared_parameters(shape.hidden_size)
    if shape.index and shape.index.weighs_heads:
        whole += shape.index.num_layers * shape.index.parameters(shape.hidden_size)
    return (num_ranks - 1) * whole * shape.item_bytes


def gpu_peer_link(gpu: Gpu) -> PeerLink:
    """Return the link between GPUs of one host: NVLink if they have it, else PCIe."""
    if gpu.nvlink_bytes_per_second:
        figure = Figure(gpu.nvlink_bytes_per_second, PEER_EFFICIENCY, False, "NVIDIA data sheet, one direction")
        return PeerLink("NVLink", figure, NVLINK_STEP_SECONDS)
    figure = Figure(gpu.host_bytes_per_second, PEER_EFFICIENCY, False, "PCIe, one direction")
    return PeerLink("PCIe", figure, PCIE_STEP_SECONDS)


def network_peer_link(bytes_per_second: float) -> PeerLink:
    """Return a link between hosts that sends ``bytes_per_second``."""
    return PeerLink("network", Figure(bytes_per_second, PEER_EFFICIENCY, False, "as given"), NETWORK_STEP_SECONDS)
