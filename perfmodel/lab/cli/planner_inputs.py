"""Makes a planner from a machine's times, however the flags describe the machine."""

from __future__ import annotations

import argparse
import math
from dataclasses import dataclass, replace

from fastdecode.api.settings import parse_bytes
from fastdecode.core.errors import ConfigError, PlanError
from fastdecode.core.placing import AskedPlacing
from fastdecode.perfmodel.hardware import Gpu, parse_link
from fastdecode.perfmodel.lab.cli.shape_inputs import (
    gpu_kv_bytes,
    mean_row_bytes,
)
from fastdecode.perfmodel.lab.gpu_only import GpuServer
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.rank_costs import RankGroup, gpu_peer_link, network_peer_link
from fastdecode.perfmodel.sizing import NO_PRICES, Prices, Workload
from fastdecode.perfmodel.stages import (
    RPart,
    SPart,
    Transport,
    beside_states,
)
from fastdecode.perfmodel.states_here import StatesHere
from fastdecode.perfmodel.storage_costs import StorageCosts


@dataclass(frozen=True)
class PlanInputs:
    """The inputs of a plan.

    ``title``, ``assumptions``: text. ``server``: None without a named GPU; ``gpu_name`` is then empty, as is
    ``host_name`` without a host. ``list_prices``: of presets, if known; they do not affect the plan. ``one_host``:
    R-workers run on the GPU's own host, so there is one machine. ``shape``: of the whole model; None if unknown.
    """

    planner: Planner
    server: GpuServer | None
    kv_cache_dtype: str
    title: str
    assumptions: tuple[str, ...]
    gpu_name: str = ""
    host_name: str = ""
    list_prices: Prices = NO_PRICES
    one_host: bool = False
    shape: ModelShape | None = None


def beside_weights(memory: int, shape: ModelShape) -> int:
    """Return the bytes of ``memory`` that the K and V projections of latents, if an R-worker has them, leave free."""
    weights = shape.kv_layout(shape.dtype).weight_bytes
    if memory <= weights:
        raise PlanError(
            f"latent_absorption: K and V of {shape.name} take {weights:,} bytes of each R-worker, of {memory:,}: "
            f"give more --kv-cache-memory, or --latent-absorption s"
        )
    return memory - weights


def make_planner(
    args: argparse.Namespace,
    shape: ModelShape | None,
    kv_dtype: str,
    s_part: SPart,
    r_part: RPart,
    hop_bytes_per_second: tuple[float, ...],
    latency_seconds: float = 0.0,
    memory: int | None = None,
    r_workers_per_host: int = 1,
    states: StatesHere | None = None,
    pair_seconds: float = 0.0,
    overlapped: bool | None = None,
) -> Planner:
    """Return the planner for the workload of ``args``, with the given times of S-part, R-part and links."""
    workload = asked_workload(args)
    kv_bytes = shape.kv_bytes_per_token(kv_dtype) if shape else None
    share = shape.read_share(kv_dtype, workload.read_share(shape.windows, shape.chunked)) if shape else 1.0
    row_bytes = mean_row_bytes(shape, workload) if shape else 0.0
    return Planner(
        workload=workload,
        num_layers=shape.num_layers if shape else args.num_layers,
        s_part=s_part,
        r_part=r_part,
        transport=Transport(
            row_bytes,
            hop_bytes_per_second,
            latency_seconds,
            not args.exposed_transport if overlapped is None else overlapped,
        ),
        num_mini_batches=2 if args.num_mini_batches is None else args.num_mini_batches,
        capacity_tokens=memory / kv_bytes if memory and kv_bytes else math.inf,
        r_workers_per_host=r_workers_per_host,
        prices=Prices(args.gpu_price, args.cpu_price, args.tensor_parallel_size),
        interval_steps=args.interval_steps,
        kv_bytes_per_token=kv_bytes,
        num_ranks=args.tensor_parallel_size,
        placing=AskedPlacing.of(args).uncut,
        read_share=share,
        num_r_workers=args.num_r_workers,
        storage=StorageCosts.of(shape, r_part),
        state_bytes_per_sequence=shape.state_bytes_per_sequence if shape else 0,
        states=states,
        pair_seconds=pair_seconds,
    )


def asked_state_memory(args: argparse.Namespace) -> int | None:
    """Return the bytes for recurrent states on the S-worker; None if no flag gives them."""
    return parse_bytes("state_memory", args.state_memory) if args.state_memory else None


def rank_group(args: argparse.Namespace, gpu: Gpu) -> RankGroup:
    """Return the tensor-parallel ranks, with one GPU each. Their link is ``--rank-link``, else NVLink or PCIe."""
    link = network_peer_link(parse_link(args.rank_link)) if args.rank_link else gpu_peer_link(gpu)
    return RankGroup(args.tensor_parallel_size, link)


def gpu_server(planner: Planner, shape: ModelShape, kv_dtype: str, gpu: Gpu, group: RankGroup) -> GpuServer:
    """Return a server of the GPUs without R-workers. Raise PlanError if their memory does not hold the weights."""
    held = gpu_kv_bytes(shape, kv_dtype, planner.read_share)
    server = GpuServer(shape, gpu, held[0], replace(planner.workload, remote_prompts=False), group, held[1])
    server.check_weights()
    return server


def of_read_rows(
    args: argparse.Namespace,
    shape: ModelShape | None,
    r_part: RPart,
    scan: RPart | None = None,
    state: tuple[float, float] | None = None,
) -> RPart:
    """Return ``r_part``, measured with full attention, for layers that read fewer tokens (sliding windows, an index).

    ``scan``: times to scan an index. ``state``: seconds of a recurrent layer's call, and of one sequence in that call.
    """
    if shape is None:
        return r_part
    if (shape.state and state is None) or (shape.index and scan is None):
        does = "advances states" if shape.state else "scans an index"
        raise ConfigError(
            f"{shape.name} {does}, and nothing given here has its time: name --gpu and --cpu, or a profile of it"
        )
    share = asked_workload(args).read_share(shape.windows, shape.chunked)
    own = replace(r_part, seconds_per_token=share * r_part.seconds_per_token)
    if shape.state and state:
        return beside_states(own, shape, state, asked_workload(args).prompt_context)
    if scan is None or shape.index is None:
        return own
    return own.beside_scan(scan, shape.index.num_layers / shape.num_layers)


def asked_workload(args: argparse.Namespace) -> Workload:
    """Return the workload that the flags describe."""
    remote_prompts = getattr(args, "num_prefill_workers", None) is not None
    return Workload(args.seq_len, args.prompt_len, args.output_len_cv, args.shared_prefix_len, remote_prompts)


def asked_memory(args: argparse.Namespace) -> int | None:
    """Return the bytes of KV per R-worker; None if no flag gives them."""
    return parse_bytes("kv_cache_memory", args.kv_cache_memory) if args.kv_cache_memory else None
