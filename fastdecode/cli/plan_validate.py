"""``fastdecode plan --validate``: predicted against measured, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from fastdecode.cli.isa import chosen_isa
from fastdecode.config import EngineConfig
from fastdecode.errors import ConfigError
from fastdecode.machine import usable_cores
from fastdecode.perfmodel.identity import check_alike, check_own, this_machine
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import load_profile

if TYPE_CHECKING:
    from fastdecode.bench.validate import ValidatedRow


def run_validation(args: argparse.Namespace) -> int:
    """Print a row per configuration and the errors; refuse a profile of another machine, version or model."""
    if not args.profile or not args.model:
        raise ConfigError("validate needs --profile, made here by `fastdecode calibrate`, and the --model folder of it")
    profile = load_profile(args.profile)
    config = _checked_config(args, profile)
    from fastdecode.bench.offline_run import offline_line
    from fastdecode.bench.validate import configurations, require_measured, validation
    from fastdecode.bench.validate_table import HEADER, error_line, plot_rows, row_figures, table_line

    grid = configurations(profile.shape, usable_cores())
    count = min(args.validate or len(grid), len(grid))
    todo = [grid[index * len(grid) // count] for index in range(count)]
    require_measured(profile, todo)
    print(f"{profile.shape.name} on {profile.machine.host}: {profile.machine.s_worker}")
    print(HEADER, flush=True)
    rows: list[ValidatedRow] = []
    with validation(config, profile) as measuring, _bar(len(todo)) as bar:
        for row in measuring.run(todo, bar.update):
            rows.append(row)
            tqdm.write(table_line(row, profile.shape.num_heads), file=sys.stdout)
            sys.stdout.flush()
        print(error_line(rows), flush=True)
        offline = measuring.offline()
    print(offline_line(offline))
    if args.plot:
        plot_rows(rows, args.plot)
    if args.output_json:
        figures = {"configurations": [row_figures(row) for row in rows], "offline": vars(offline)}
        Path(args.output_json).write_text(json.dumps(figures, indent=2) + "\n")
    return 0


def _checked_config(args: argparse.Namespace, profile: HardwareProfile) -> EngineConfig:
    """The profile's model, its S-worker on the CPU."""
    from fastdecode.sworker.loader import model_shape

    if args.validate is not None and args.validate < 0:
        raise ConfigError(f"validate: a number of configurations, not {args.validate}")
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


def _bar(total: int) -> tqdm:
    return tqdm(total=total, unit="run", disable=None if sys.stderr.isatty() else True)
