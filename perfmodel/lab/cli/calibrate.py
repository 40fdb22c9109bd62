"""``fastdecode calibrate``: measures this machine, its R-workers and links into a hardware profile."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.api.config import EngineConfig
from fastdecode.cli.flags import add_calibrated_flags, add_common_flags, add_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.bench_prefill import LEAST_LEN, bench_config, wholes
from fastdecode.perfmodel.prefill_rates import measured_prefill_model, measured_speeds
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import write_profile

if TYPE_CHECKING:
    from fastdecode.perfmodel.lab.measure.calibration_plan import CalibrationPlan


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, the R-workers and the links",
        description="Times the S-part of the model's layers over batch sizes, attention over KV dtypes, groups, "
        "contexts and threads, the way to each R-worker, the engine's own work, and what S and R take from each other. "
        "plan, simulate and the engine's --profile read the result. Nothing else should run meanwhile.",
    )
    parser.add_argument(
        "--output", metavar="FILE", default="profile.json", help="file to write the profile to (profile.json)"
    )
    parser.add_argument(
        "--quick", action="store_true", help="measure only this KV dtype and all cores, in under a minute (off)"
    )
    add_calibrated_flags(parser)
    add_flags(
        parser.add_argument_group("ranks"), EngineConfig, ["tensor_parallel_size"],
        tensor_parallel_size={"help": "measure the S-part of N ranks of this machine too, all-reduces included"},
    )  # fmt: skip
    _add_prefill_flags(parser.add_argument_group("prefill workers"))
    add_common_flags(parser)
    parser.set_defaults(run=run)


def _add_prefill_flags(group: Any) -> None:
    group.add_argument(
        "--prefill", action="store_true",
        help="also measure prefill workers, and search the best parts of prompts for them (off)",
    )  # fmt: skip
    add_flags(group, EngineConfig, ("prefill_workers", "prefill_threads", "prefill_cores"))
    group.add_argument(
        "--prefill-lens", default="512,1024,2048,4096", metavar="LIST",
        help="lengths of their prompts in tokens (512,1024,2048,4096)",
    )  # fmt: skip


def run(args: argparse.Namespace) -> int:
    """Measure, and write the profile."""
    check_output_files(args.output)
    lengths = wholes("prefill_lens", args.prefill_lens, LEAST_LEN)
    if not args.prefill and args.prefill_workers:
        raise ConfigError("prefill_workers: prefill workers are measured only with --prefill")
    if args.r_workers == "mpi":
        raise ConfigError("r_workers: calibrate measures inproc, spawn and host:port; ranks of an MPI job not yet")
    num_ranks = args.tensor_parallel_size
    check_own_ranks(num_ranks)
    config = replace(engine_config(args), tensor_parallel_size=1)
    from fastdecode.perfmodel.lab.measure.calibration_plan import full_plan, quick_plan
    from fastdecode.perfmodel.lab.measure.calibrator import Calibrator
    from fastdecode.sworker.model.loader import device_name
    from fastdecode.sworker.model.shape import model_shape

    shape = model_shape(config)
    kv_dtype = shape.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    links, on_gpu = _links(config), bool(device_name(config))
    plan = quick_plan(shape, kv_dtype, links, on_gpu) if args.quick else full_plan(shape, links, on_gpu)
    plan = replace(plan, num_ranks=num_ranks)
    with progress_bar(plan.num_measurements, "it") as bar:
        profile = Calibrator(without_prefill_workers(config), shape, plan, bar.update).run()
    if num_ranks > 1:
        profile = _with_ranks(profile, without_prefill_workers(config), plan, num_ranks)
    if args.prefill:
        profile = _with_prefill(profile, config, lengths, args.quick)
    Path(args.output).write_text(write_profile(profile), encoding="utf-8")
    for line in summary_lines(profile):
        print(line)
    print(f"Profile of {profile.machine.host}: {args.output}")
    return 0


def without_prefill_workers(config: EngineConfig) -> EngineConfig:
    """Return this configuration without prefill workers."""
    return replace(config, prefill_workers=None, prefill_threads=None, prefill_cores=None)


def check_own_ranks(num_ranks: int) -> None:
    """Raise ConfigError if a launcher started the ranks, since ``calibrate`` starts and ends ranks several times."""
    from fastdecode.tensor_parallel.rank_place import find_place

    if num_ranks > 1 and find_place(num_ranks):
        raise ConfigError("tensor_parallel_size: calibrate starts the ranks itself: run a single process")


def _with_ranks(
    profile: HardwareProfile, config: EngineConfig, plan: CalibrationPlan, num_ranks: int
) -> HardwareProfile:
    from fastdecode.perfmodel.lab.measure.rank_calibrator import RankCalibration, calibrate_ranks

    ranks = RankCalibration(num_ranks, plan.batch_sizes, plan.s_threads[-1], plan.rounds, plan.most_tries)
    with progress_bar(ranks.num_measurements, "it") as bar:
        return calibrate_ranks(profile, config, ranks, bar.update)


def _with_prefill(profile: HardwareProfile, config: EngineConfig, lengths: list[int], quick: bool) -> HardwareProfile:
    """Return the profile with the rates of prefill workers, and a table of how best to split prompts of each length."""
    from fastdecode.perfmodel.lab.measure.prefill_calibrator import (
        PrefillCalibration,
        calibrate_prefill,
        num_measurements,
    )
    from fastdecode.perfmodel.lab.measure.prefill_runs import LivePrefill

    config = bench_config(replace(config, load_format="dummy", skip_tokenizer_init=True), lengths[-1])
    with closing(LivePrefill(config, config.seed)) as runner:
        counts = tuple(range(1, runner.num_workers + 1))
        plan = PrefillCalibration(tuple(lengths), tuple(lengths[-2:] if quick else lengths), counts, 1 if quick else 3)
        with progress_bar(num_measurements(plan, runner.num_workers), "it") as bar:
            return calibrate_prefill(profile, runner, plan, bar.update)


def summary_lines(profile: HardwareProfile) -> list[str]:
    """Return the measurements as text lines."""
    lines = [f"{profile.shape.name} on {profile.machine.s_worker}, R-workers {profile.machine.r_worker}"]
    for ranks, threads in sorted({(point.tensor_parallel_size, point.threads) for point in profile.s_part}):
        points = [p for p in profile.s_part if (p.tensor_parallel_size, p.threads) == (ranks, threads)]
        times = ", ".join(f"{p.batch_size}: {p.layer_seconds * 1e3:.3g} ± {50 * p.spread:.0f} %" for p in points)
        of_ranks = f"{ranks} ranks of " if ranks > 1 else ""
        lines.append(f"T(B) of a layer, {of_ranks}{threads} thread(s), ms: {times}")
    of_rows = [point for point in profile.r_part if point.kind == "rows"]
    shapes = sorted({(p.r_worker, p.kv_cache_dtype, p.num_kv_heads, p.threads) for p in of_rows})
    for r_worker, kv_dtype, kv_heads, threads in shapes:
        shape = profile.shape.with_kv_heads(kv_heads)
        part = profile.measured_r_part(kv_dtype, threads, shape, r_worker)
        rate = shape.layer_layout.token_bytes(kv_dtype) / part.seconds_per_token / 1e9
        lines.append(
            f"R {r_worker}, {kv_dtype}, {shape.num_heads} / {kv_heads} heads, {threads} thread(s): "
            f"{part.seconds_per_token * 1e9:.3g} ns per token ({rate:.3g} GB/s), {part.row_seconds * 1e6:.2g} µs per "
            f"row, {part.call_seconds * 1e6:.3g} µs per call"
        )
    lines += _state_lines(profile)
    for name in sorted({point.r_worker for point in profile.links}):
        way, (fixed, per_row) = profile.transport(name), profile.step_overhead_seconds(name)
        speed = f", {way.hop_bytes_per_second[0] / 1e9:.3g} GB/s" if way.hop_bytes_per_second else ""
        lines.append(
            f"{name}: {way.latency_seconds * 1e6:.3g} µs there and back{speed}; host {fixed * 1e3:.3g} ms per step and "
            f"{per_row * 1e6:.2g} µs per sequence"
        )
    lines += prefill_lines(profile) if profile.prefill else []
    for point in profile.contention:
        lines.append(
            f"S ({point.s_threads} thread(s)) beside R ({point.r_threads}, {point.num_kv_heads} KV heads): "
            f"{point.s_slowdown:.3g} and {point.r_slowdown:.3g} times as slow"
        )
    return lines


def prefill_lines(profile: HardwareProfile) -> list[str]:
    """Return the measurements of prefill workers as text lines."""
    lines = []
    for num_busy in sorted({point.num_busy for point in profile.prefill}):
        model = measured_prefill_model(profile, num_busy)
        row = model.num_layers * model.s_part.layer_seconds(1000) / 1000
        pair, beside = model.num_layers * model.attention.pair_seconds, f", {num_busy} at once" * (num_busy > 1)
        lines.append(
            f"Prefill worker{beside}: {row * 1e6:.3g} µs per token and {pair * 1e9:.3g} ns per pair, all layers"
        )
    speeds = measured_speeds(profile)
    if len(speeds) > 1:
        lines.append(f"Prefill workers' speeds: {', '.join(f'{speed:.3g}' for speed in speeds)}")
    lines += [
        f"Best parts of {each.num_tokens} tokens: {' + '.join(map(str, each.parts))}" for each in profile.partitions
    ]
    return lines


def _links(config: EngineConfig) -> tuple[str, ...]:
    """Return the R-workers to measure: local "inproc" and "spawn", the requested one first, or the remote addresses."""
    spec = config.r_worker_spec
    if spec.addresses:
        return spec.addresses
    return ("spawn", "inproc") if spec.kind == "spawn" else ("inproc", "spawn")


def _state_lines(profile: HardwareProfile) -> list[str]:
    """Return text lines: the time of one recurrent layer, and the bytes of its states read and written per second."""
    if profile.shape.state is None:
        return []
    state_bytes = profile.shape.state_bytes_per_sequence / profile.shape.state.num_layers
    lines = []
    measured = {(p.r_worker, p.kv_cache_dtype, p.threads) for p in profile.r_part if p.kind == "state"}
    for r_worker, kv_dtype, threads in sorted(measured):
        per_call, per_row = profile.measured_state(kv_dtype, threads, r_worker)
        rate = 2 * state_bytes / per_row / 1e9
        lines.append(
            f"states {r_worker}, {kv_dtype} cache, {threads} thread(s): {per_row * 1e6:.3g} µs per sequence and layer "
            f"({rate:.3g} GB/s read and written), {per_call * 1e6:.3g} µs per call"
        )
    return lines
