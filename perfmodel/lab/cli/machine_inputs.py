"""Makes a planner from the flags of ``plan`` and ``simulate``: named presets, a measured profile, or numbers."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

from fastdecode.api.settings import parse_bytes
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import Gpu, parse_link
from fastdecode.perfmodel.host_r_part import host_r_part
from fastdecode.perfmodel.lab.cli.assumptions import (
    absorption_lines,
    figures,
    rank_lines,
    state_lines,
    token_lines,
    window_lines,
)
from fastdecode.perfmodel.lab.cli.bounds import check_context, check_r_workers
from fastdecode.perfmodel.lab.cli.machine_flags import BARE_FLAGS
from fastdecode.perfmodel.lab.cli.named_machine import NamedMachine, named_machine, per_host
from fastdecode.perfmodel.lab.cli.planner_inputs import (
    PlanInputs,
    asked_memory,
    asked_state_memory,
    asked_workload,
    beside_weights,
    gpu_server,
    make_planner,
    of_read_rows,
    rank_group,
)
from fastdecode.perfmodel.lab.cli.shape_inputs import (
    asked_shape,
    file_bits,
    kv_dtype_of,
    named_shape,
    profiled_shape,
    weight_lines,
)
from fastdecode.perfmodel.lab.gpu_only import check_weights, held_bytes, pair_seconds, usable_bytes
from fastdecode.perfmodel.lab.planner import Planner
from fastdecode.perfmodel.machine_words import gpu_of
from fastdecode.perfmodel.measurements import HERE
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import load_profile
from fastdecode.perfmodel.rank_costs import ALONE, RankGroup, RankSPart, network_peer_link, rank_shape
from fastdecode.perfmodel.stages import GpuSPart, MeasuredSPart, RPart, SPart
from fastdecode.perfmodel.states_here import StatesHere


def read_inputs(args: argparse.Namespace) -> PlanInputs:
    """Return the inputs of a plan. A ConfigError names a missing or conflicting flag."""
    if args.tensor_parallel_size is None:
        args = argparse.Namespace(**vars(args) | {"tensor_parallel_size": 1})
    if args.seq_len is None:
        raise ConfigError("seq_len (prompt + output tokens) is needed: --seq-len 1024")
    check_r_workers(args.num_r_workers)
    if args.model:
        check_context(named_shape(args.model), args.seq_len, "seq_len")
    bare = [name for name in BARE_FLAGS if getattr(args, name) is not None]
    if bare and args.profile:
        raise ConfigError(f"{bare[0]} and profile are two ways to say the same; give one")
    if args.latent_absorption == "r" and bare:
        raise ConfigError(
            "latent_absorption: r needs --gpu and --cpu, or a profile: bare numbers lack the time of its products"
        )
    if args.state_on == "s" and bare:
        raise ConfigError("state_on: s needs --gpu and --cpu, or a profile: bare numbers lack the time of states")
    if args.quantization and bare:
        raise ConfigError("quantization has no place beside bare numbers, which say how fast the S-worker is")
    if args.tensor_parallel_size != 1 and bare:
        raise ConfigError("tensor_parallel_size has no place beside bare numbers, which say how fast the S-worker is")
    if bare:
        return _from_numbers(args)
    return _from_profile(args) if args.profile else _from_names(args)


def _from_names(args: argparse.Namespace) -> PlanInputs:
    for name in ("model", "gpu", "cpu"):
        if getattr(args, name) is None:
            raise ConfigError(
                f"{name} is needed: --model llama-7b --gpu a10 --cpu epyc-7452, or --profile, or bare numbers "
                f"({', '.join('--' + flag.replace('_', '-') for flag in BARE_FLAGS)})"
            )
    shape, machine = asked_shape(args), named_machine(args)
    group = rank_group(args, machine.gpu)
    gpu, of_rank = machine.gpu.times(group.size), rank_shape(shape, group.size)
    kv_dtype = kv_dtype_of(args, shape)
    # Part of a preset host's memory for KV caches without --kv-cache-memory
    host_memory_fraction = 0.8
    given = args.kv_cache_memory or int(host_memory_fraction * machine.host.memory_bytes)
    memory = beside_weights(parse_bytes("kv_cache_memory", given), of_rank)
    planner = _named_planner(args, shape, machine, group, kv_dtype, memory)
    check_weights(shape, gpu, group)
    return PlanInputs(
        planner,
        gpu_server(planner, replace(shape, weight_bits=file_bits(args)), kv_dtype, gpu, group),
        kv_dtype,
        f"{shape.name} on {gpu.name} and {machine.host.name}",
        (
            *_machine_lines(args, machine, gpu),
            *weight_lines(args, shape),
            *rank_lines(group),
            *token_lines(of_rank, kv_dtype, planner),
            *absorption_lines(of_rank),
            *window_lines(shape, planner),
            *state_lines(of_rank, planner),
            f"{memory / 1e9:.4g} GB of KV per R-worker, {planner.r_workers_per_host} per host",
            *machine.price_lines(args),
        ),
        gpu.counted_name,
        machine.host.name,
        machine.list_prices(group.size),
        machine.link_bytes_per_second is None,
        shape,
    )


def _named_planner(
    args: argparse.Namespace, shape: ModelShape, machine: NamedMachine, group: RankGroup, kv_dtype: str, memory: int
) -> Planner:
    """Return the planner for a GPU and hosts that presets or numbers describe. ``memory``: bytes of KV per R-worker."""
    gpu, of_rank, workload = machine.gpu.times(group.size), rank_shape(shape, group.size), asked_workload(args)
    rank, share = GpuSPart(of_rank, machine.gpu), workload.read_share(shape.windows, shape.chunked)
    planner = make_planner(
        args,
        of_rank,
        kv_dtype,
        RankSPart(rank, shape, group) if group.size > 1 else rank,
        host_r_part(of_rank, kv_dtype, machine.host, share, workload.prompt_context),
        machine.hops(group.size),
        shape.sent_share * machine.trip_latency_seconds,
        memory=memory,
        r_workers_per_host=machine.host.r_workers_per_host,
        states=_gpu_states(args, shape, gpu, group),
        pair_seconds=pair_seconds(shape, gpu),
        overlapped=args.overlapped_transport,
    )
    return machine.at_home(replace(planner, waits_for_slowest=True))


def _machine_lines(args: argparse.Namespace, machine: NamedMachine, gpu: Gpu) -> tuple[str, ...]:
    """Return text lines on the speeds that a plan assumes, and on what each layer waits for."""
    read = gpu.kv_bytes_per_second.achieved / 1e9
    roofline = "the roofline, which is kinder to it than any server; prompts count on both sides"
    alone = f"GPU alone: reads weights and cache at {read:,.4g} GB/s, {roofline}"
    waits = machine.waits(args.overlapped_transport)
    return *figures(gpu), alone, *figures(machine.host), machine.links(gpu), waits


def _from_profile(args: argparse.Namespace) -> PlanInputs:
    if args.cpu:
        raise ConfigError("cpu and profile are two ways to say how fast an R-worker is; give one")
    profile = load_profile(args.profile)
    shape = profiled_shape(args, profile).absorbing(args.latent_absorption == "r").keeping_states(args.state_on == "s")
    kv_dtype = kv_dtype_of(args, shape)
    r_part = profile.measured_r_part(kv_dtype, shape=shape, num_ranks=args.tensor_parallel_size)
    memory = asked_memory(args)
    if memory:
        memory = beside_weights(memory, rank_shape(shape, args.tensor_parallel_size))
    link, num_ranks = profile.transport(), args.tensor_parallel_size
    rates = (parse_link(args.link) / num_ranks,) if args.link else link.hop_bytes_per_second
    planner = make_planner(
        args, rank_shape(shape, num_ranks), kv_dtype, _profiled_s_part(args, profile, shape),
        of_read_rows(
            args, shape, r_part, profile.measured_scan(kv_dtype) if shape.index else None,
            profile.measured_state(kv_dtype) if shape.state else None,
        ),
        rates, shape.sent_share * link.latency_seconds, memory, per_host(args, 1),
        _profiled_states(args, shape, profile, kv_dtype),
    )  # fmt: skip
    planner = _with_overheads(planner, profile)
    one = gpu_of(args.gpu) if args.gpu else None
    group = rank_group(args, one) if one else ALONE
    gpu = one.times(group.size) if one else None
    server = gpu_server(planner, shape, kv_dtype, gpu, group) if gpu else None
    machine = profile.machine
    whose = (
        f"measured on {machine.host} with fastdecode {machine.fastdecode_version}: S-worker {machine.s_worker}, "
        f"R-worker {machine.r_worker} ({machine.isa})"
    )
    assumptions = (
        whose,
        *(figures(gpu) if gpu else ()),
        *rank_lines(group),
        *absorption_lines(shape),
        *window_lines(shape, planner),
        *state_lines(shape, planner),
    )
    return PlanInputs(
        planner, server, kv_dtype, f"{shape.name} on the machine of {Path(args.profile).name}", assumptions
    )


def _from_numbers(args: argparse.Namespace) -> PlanInputs:
    missing = [name for name in (*BARE_FLAGS, "mini_batch_size") if getattr(args, name) is None]
    if missing:
        raise ConfigError(f"{missing[0]} is needed beside bare numbers: T(B) is the time of one mini-batch size")
    if args.gpu or args.cpu:
        raise ConfigError("gpu and cpu have no place beside bare numbers, which say how fast they are")
    shape = asked_shape(args) if args.model else None
    if shape is None and (args.link or args.kv_cache_memory or args.kv_cache_dtype != "auto"):
        raise ConfigError("link, kv_cache_memory and kv_cache_dtype need --model beside bare numbers, for its sizes")
    if shape and shape.num_layers != args.num_layers:
        raise ConfigError(f"num_layers is {args.num_layers}, and {shape.name} has {shape.num_layers}")
    rows = max(round(args.mini_batch_size * asked_workload(args).rows_per_output_token), 1)
    s_part = MeasuredSPart((rows,), (args.s_part_seconds,), (0.0,))
    kv_dtype = kv_dtype_of(args, shape) if shape else "auto"
    rates = (parse_link(args.link),) if args.link else ()
    planner = make_planner(
        args, shape, kv_dtype, s_part, of_read_rows(args, shape, RPart(args.r_part_seconds_per_token)), rates,
        memory=asked_memory(args), r_workers_per_host=per_host(args, 1),
    )  # fmt: skip
    assumptions = ("S and R times as given", *(window_lines(shape, planner) if shape else ()))
    return PlanInputs(planner, None, kv_dtype, shape.name if shape else "bare numbers", assumptions)


def _gpu_states(args: argparse.Namespace, shape: ModelShape, gpu: Gpu, group: RankGroup) -> StatesHere | None:
    """Return the cost of recurrent states kept on the GPUs of ``group``; None if R-workers keep them.
    States use the memory that the weights leave free. Reading them is as fast as reading a KV cache.
    """
    if shape.own_states is None:
        return None
    memory = asked_state_memory(args) or usable_bytes(gpu) - held_bytes(shape, group)
    return StatesHere.of_bandwidth(shape, gpu.kv_bytes_per_second.achieved, memory)


def _profiled_states(
    args: argparse.Namespace, shape: ModelShape, profile: HardwareProfile, kv_dtype: str
) -> StatesHere | None:
    """Return the cost of recurrent states on the S-worker, at the rate measured on local R-workers.
    Without ``--state-memory`` any number of states fits, since a profile does not have the size of the S-worker's
    memory.
    """
    if shape.own_states is None:
        return None
    memory = asked_state_memory(args)
    places = memory // shape.state_bytes_per_sequence if memory else math.inf
    return StatesHere.as_measured(shape, profile.measured_state(kv_dtype, r_worker=HERE), places)


def _profiled_s_part(args: argparse.Namespace, profile: HardwareProfile, shape: ModelShape) -> SPart:
    """Return the S-part's times with the requested number of ranks.

    Ranks that were not measured take one rank's time divided by their number, plus the time of all-reduces."""
    num_ranks = args.tensor_parallel_size
    if num_ranks in {1, *profile.measured_rank_counts}:
        return profile.measured_s_part(shape=shape, num_ranks=num_ranks)
    if not args.rank_link:
        raise profile.lacks(
            f"no S-part of {num_ranks} ranks", sorted(profile.measured_rank_counts),
            f"`fastdecode calibrate --tensor-parallel-size {num_ranks}` measures them; or give --rank-link, and "
            f"all-reduces over it are added to a part of one rank's",
        )  # fmt: skip
    group = RankGroup(num_ranks, network_peer_link(parse_link(args.rank_link)))
    return RankSPart(profile.measured_s_part(shape=shape).times(1 / num_ranks, 1 / num_ranks), shape, group)


def _with_overheads(planner: Planner, profile: HardwareProfile) -> Planner:
    """Return ``planner`` with the engine's own time in each step (scheduling, bookkeeping), as measured."""
    (none, per_row), (one, _) = (profile.step_overhead_seconds(None, number, planner.num_ranks) for number in (0, 1))
    return replace(
        planner, step_overhead_seconds=none, row_overhead_seconds=per_row, r_worker_overhead_seconds=one - none
    )
