"""``fastdecode calibrate``: measure this machine, its R-workers and links into a hardware profile."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fastdecode.cli.flags import add_calibrated_flags, add_common_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar
from fastdecode.config import EngineConfig
from fastdecode.errors import ConfigError
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import write_profile


def add_command(commands: Any) -> None:
    """Register the command."""
    parser = commands.add_parser(
        "calibrate",
        help="measure this machine, the R-workers and the links",
        description="Times the S-part of the model's layers over batch sizes, attention over KV dtypes, groups, "
        "contexts and threads, the way to each R-worker, the engine's own work, and what S and R take from each other. "
        "plan, simulate and the engine's --profile read the result. Nothing else should run meanwhile.",
    )
    parser.add_argument("--output", metavar="FILE", default="profile.json", help="(profile.json)")
    parser.add_argument(
        "--quick", action="store_true", help="this KV dtype and all cores only, in under a minute (off)"
    )
    add_calibrated_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, and write the profile."""
    check_output_files(args.output)
    if args.r_workers == "mpi":
        raise ConfigError("r_workers: calibrate measures inproc, spawn and host:port; ranks of an MPI job not yet")
    config = engine_config(args)
    from fastdecode.measure.calibrator import Calibrator, full_plan, quick_plan
    from fastdecode.sworker.loader import device_name, model_shape

    shape = model_shape(config)
    kv_dtype = shape.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype
    links, on_gpu = _links(config), bool(device_name(config))
    plan = quick_plan(shape, kv_dtype, links, on_gpu) if args.quick else full_plan(shape, links, on_gpu)
    with progress_bar(plan.num_measurements, "it") as bar:
        profile = Calibrator(config, shape, plan, bar.update).run()
    Path(args.output).write_text(write_profile(profile))
    for line in summary_lines(profile):
        print(line)
    print(f"Profile of {profile.machine.host}: {args.output}")
    return 0


def summary_lines(profile: HardwareProfile) -> list[str]:
    """The measurements as lines of text."""
    lines = [f"{profile.shape.name} on {profile.machine.s_worker}, R-workers {profile.machine.r_worker}"]
    for threads in sorted({point.threads for point in profile.s_part}):
        points = [point for point in profile.s_part if point.threads == threads]
        times = ", ".join(f"{p.batch_size}: {p.layer_seconds * 1e3:.3g} ± {50 * p.spread:.0f} %" for p in points)
        lines.append(f"T(B) of a layer, {threads} thread(s), ms: {times}")
    shapes = sorted({(p.r_worker, p.kv_cache_dtype, p.num_kv_heads, p.threads) for p in profile.r_part})
    for r_worker, kv_dtype, kv_heads, threads in shapes:
        shape = profile.shape.with_kv_heads(kv_heads)
        part = profile.measured_r_part(kv_dtype, threads, shape, r_worker)
        rate = shape.layer_layout.kv_bytes_per_token(kv_dtype) / part.seconds_per_token / 1e9
        lines.append(
            f"R {r_worker}, {kv_dtype}, {shape.num_heads} / {kv_heads} heads, {threads} thread(s): "
            f"{part.seconds_per_token * 1e9:.3g} ns per token ({rate:.3g} GB/s), {part.row_seconds * 1e6:.2g} µs per "
            f"row, {part.call_seconds * 1e6:.3g} µs per call"
        )
    for name in sorted({point.r_worker for point in profile.links}):
        way, (fixed, per_row) = profile.transport(name), profile.step_overhead_seconds(name)
        speed = f", {way.hop_bytes_per_second[0] / 1e9:.3g} GB/s" if way.hop_bytes_per_second else ""
        lines.append(
            f"{name}: {way.latency_seconds * 1e6:.3g} µs there and back{speed}; host {fixed * 1e3:.3g} ms per step and "
            f"{per_row * 1e6:.2g} µs per sequence"
        )
    for point in profile.contention:
        lines.append(
            f"S ({point.s_threads} thread(s)) beside R ({point.r_threads}, {point.num_kv_heads} KV heads): "
            f"{point.s_slowdown:.3g} and {point.r_slowdown:.3g} times as slow"
        )
    return lines


def _links(config: EngineConfig) -> tuple[str, ...]:
    """Both kinds of R-workers of this machine, the one asked for first; or each of those elsewhere."""
    spec = config.r_worker_spec
    if spec.addresses:
        return spec.addresses
    return ("spawn", "inproc") if spec.kind == "spawn" else ("inproc", "spawn")
