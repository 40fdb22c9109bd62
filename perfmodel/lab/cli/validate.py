"""``fastdecode validate``: predicted against measured times on this machine."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from fastdecode.api.config import EngineConfig
from fastdecode.cli.collect_env import chosen_isa
from fastdecode.cli.flags import add_common_flags
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import usable_cores
from fastdecode.perfmodel.calibration import MOST_DRIFT
from fastdecode.perfmodel.deployment import check_alike, check_own, this_machine
from fastdecode.perfmodel.lab.cli.calibrate import check_own_ranks
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import load_profile

if TYPE_CHECKING:
    from fastdecode.perfmodel.lab.measure.offline_run import OfflineRun
    from fastdecode.perfmodel.lab.measure.validation import Configuration, ValidatedRow, Validation


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "validate",
        help="predicted against measured on this machine",
        description="Runs real configurations of the profile's model here, S-worker on the CPU, and prints for each "
        "the step time that the performance model predicts beside the one measured. Nothing else should run meanwhile.",
    )
    parser.add_argument(
        "--profile", required=True, metavar="FILE", help="hardware profile of this machine, from `fastdecode calibrate`"
    )
    parser.add_argument("--model", required=True, metavar="PATH_OR_ID", help="model with which the profile was made")
    parser.add_argument(
        "--num-configurations", type=int, metavar="N",
        help="number of configurations, spread evenly over the grid (all 28)",
    )  # fmt: skip
    parser.add_argument(
        "--ranges", action="store_true",
        help="measure only sequences in ranges over two R-workers, without grid and offline run (off)",
    )  # fmt: skip
    parser.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="measure only N ranks that share this machine's cores, without grid and offline run (1)",
    )  # fmt: skip
    parser.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    parser.add_argument("--plot", metavar="PNG", help="file for a picture: measured against predicted step times")
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print each configuration's prediction error. Refuse a profile of another machine, version or model."""
    check_output_files(args.output_json, plots=(args.plot,))
    if args.num_configurations is not None and args.num_configurations < 1:
        raise ConfigError(f"num_configurations must be at least 1, not {args.num_configurations}")
    if args.tensor_parallel_size < 1 or (args.tensor_parallel_size > 1 and args.ranges):
        raise ConfigError(
            f"tensor_parallel_size is {args.tensor_parallel_size}: it must be at least 1, and 1 beside --ranges"
        )
    check_own_ranks(args.tensor_parallel_size)
    profile = load_profile(args.profile)
    config = _checked_config(args, profile)
    from fastdecode.perfmodel.lab.measure.offline_run import offline_line
    from fastdecode.perfmodel.lab.measure.validation import Validation, require_measured
    from fastdecode.sworker.model.shape import model_shape

    grid, has_offline = _grid(args, profile)
    count = min(args.num_configurations or len(grid), len(grid))
    todo = [grid[index * len(grid) // count] for index in range(count)]
    require_measured(profile, todo, model_shape(config) if has_offline else None)
    print(f"{profile.shape.name} on {profile.machine.host}: {profile.machine.s_worker}")
    header = """\
    | way | R-workers | KV | heads | in flight | context | predicted ms | measured ms | error | predicted tokens/s \
    | measured tokens/s | S, R: error | anchors S, R | moved | tries |
    |---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|"""
    print(header, flush=True)
    with closing(Validation(config, profile)) as measuring, progress_bar(len(todo), "run") as bar:
        rows = (_shown(row, profile.shape.num_heads) for row in measuring.run(todo, bar.update))
        offline = run_grid(rows, measuring if has_offline else None, args.output_json, args.plot)
    if offline:
        print(offline_line(offline))
    return 0


def _grid(args: argparse.Namespace, profile: HardwareProfile) -> tuple[list[Configuration], bool]:
    """Return the requested configurations, and True if a whole workload is measured after them."""
    from fastdecode.perfmodel.lab.measure.rank_calibrator import rank_configurations
    from fastdecode.perfmodel.lab.measure.validation import configurations, range_configurations

    if args.tensor_parallel_size > 1:
        return rank_configurations(profile.shape, usable_cores(), args.tensor_parallel_size), False
    if args.ranges:
        return range_configurations(profile.shape, usable_cores()), False
    return configurations(profile.shape, usable_cores()), True


def run_grid(
    measured: Iterable[ValidatedRow], measuring: Validation | None, output_json: str | None, plot: str | None
) -> OfflineRun | None:
    """Measure and write every row of ``measured``; then measure a whole workload with ``measuring``, if given.
    An error or Ctrl-C leaves the finished rows in ``output_json``, since they take longest.
    """
    rows: list[ValidatedRow] = []
    offline: OfflineRun | None = None
    try:
        for row in measured:
            rows.append(row)
        print(error_line(rows), flush=True)
        if plot:
            from fastdecode.perfmodel.lab.measure.plots import plot_validation

            plot_validation(rows, plot)
        offline = measuring.offline() if measuring else None
        return offline
    finally:
        found = {"configurations": [row_figures(row) for row in rows], "offline": vars(offline) if offline else None}
        write_json(found, output_json)


def _shown(row: ValidatedRow, num_heads: int) -> ValidatedRow:
    tqdm.write(table_line(row, num_heads), file=sys.stdout)
    sys.stdout.flush()
    return row


def _checked_config(args: argparse.Namespace, profile: HardwareProfile) -> EngineConfig:
    """Return a configuration that runs the profile's model with the S-worker on the CPU."""
    from fastdecode.sworker.model.shape import model_shape

    config = EngineConfig(
        model=args.model,
        dtype=profile.shape.dtype,
        device="cpu",
        load_format="dummy",
        skip_tokenizer_init=True,
        seed=args.seed,
    )
    check_own(profile, this_machine("", profile.machine.r_worker, chosen_isa()))
    check_alike(profile, replace(model_shape(config), num_kv_heads=profile.shape.num_kv_heads))
    return config


def table_line(row: ValidatedRow, num_heads: int) -> str:
    """Return one row of the table."""
    each, drift = row.configuration, row.drift
    predicted, measured = row.predicted_step_seconds, row.measured_step_seconds
    s_error = row.predicted_s_seconds / row.measured_s_seconds - 1.0
    r_error = row.predicted_r_seconds / row.measured_r_seconds - 1.0
    milli = 1e3
    cells = (
        each.name, each.r_workers, each.kv_dtype, f"{num_heads} / {each.num_kv_heads}", each.batch_size,
        each.context_len, f"{predicted * milli:.1f}", f"{measured * milli:.1f}", f"{row.error:+.1%}",
        f"{each.batch_size / predicted:.0f}", f"{each.batch_size / measured:.0f}", f"{s_error:+.0%}, {r_error:+.0%}",
        f"{drift.s_part:.2f}, {drift.r_part:.2f}", f"{row.moved:.1%}", row.tries,
    )  # fmt: skip
    return f"| {' | '.join(map(str, cells))} |"


def error_line(rows: Sequence[ValidatedRow]) -> str:
    """Return the median and the worst error."""
    errors = np.abs([row.error for row in rows])
    worst = rows[int(np.argmax(errors))].configuration
    unsteady = sum(row.moved > MOST_DRIFT for row in rows)
    return (
        f"{len(rows)} configurations: median error {np.median(errors):.1%}, worst {errors.max():.1%} ({worst.name}, "
        f"{worst.kv_dtype}, {worst.batch_size} x {worst.context_len}); in {unsteady} the anchors moved by more than "
        f"{100 * MOST_DRIFT:g} % in every try"
    )


def row_figures(row: ValidatedRow) -> dict[str, Any]:
    """Return one object of ``--output-json``."""
    each = row.configuration
    names = ("name", "r_workers", "kv_dtype", "num_kv_heads", "batch_size", "context_len", "kv_shard_tokens")
    figures = {name: value for name, value in vars(row).items() if name not in ("configuration", "drift")}
    return {
        **{name: getattr(each, name) for name in names},
        **vars(each.deployment),
        **figures,
        "error": row.error,
        "s_drift": row.drift.s_part,
        "r_drift": row.drift.r_part,
    }
