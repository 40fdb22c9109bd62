"""``fastdecode plan --validate``: predicted against measured, on this machine."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from fastdecode.cli.collect_env import chosen_isa
from fastdecode.cli.plan_inputs import BARE_FLAGS
from fastdecode.config import EngineConfig
from fastdecode.errors import ConfigError
from fastdecode.machine import usable_cores
from fastdecode.perfmodel.identity import check_alike, check_own, this_machine
from fastdecode.perfmodel.profile import HardwareProfile
from fastdecode.perfmodel.profile_json import load_profile

if TYPE_CHECKING:
    from fastdecode.bench.offline_run import OfflineRun
    from fastdecode.bench.validate import ValidatedRow

UNSET: dict[str, Any] = {
    **dict.fromkeys(("emit", "gpu", "cpu", "link", "kv_cache_memory", "r_workers_per_host", "gpu_price", "cpu_price")),
    **dict.fromkeys((*BARE_FLAGS, "seq_len", "mini_batch_size", "latency_limit", "interval_steps")),
    **dict.fromkeys(("prompt_len", "shared_prefix_len", "output_len_cv"), 0.0),
    "exposed_transport": False,
    "kv_cache_dtype": "auto",
    "num_mini_batches": 2,
    "tensor_parallel_size": 1,
}
"""Flags of a plan as they are where nobody gave them; what is validated are configurations of its own, here."""


def run_validation(args: argparse.Namespace) -> int:
    """Print a row per configuration and the errors; refuse a profile of another machine, version or model."""
    given = [name for name, unset in UNSET.items() if getattr(args, name) != unset]
    if given:
        raise ConfigError(f"{given[0]} is for a plan, and validate makes none: it runs configurations of its own here")
    if not args.profile or not args.model:
        raise ConfigError("validate needs --profile, made here by `fastdecode calibrate`, and the --model folder of it")
    profile = load_profile(args.profile)
    config = _checked_config(args, profile)
    from fastdecode.bench.offline_run import offline_line
    from fastdecode.bench.validate import configurations, require_measured, validation
    from fastdecode.bench.validate_table import HEADER, error_line, plot_rows, table_line
    from fastdecode.sworker.loader import model_shape

    grid = configurations(profile.shape, usable_cores())
    count = min(args.validate or len(grid), len(grid))
    todo = [grid[index * len(grid) // count] for index in range(count)]
    require_measured(profile, todo, model_shape(config))
    print(f"{profile.shape.name} on {profile.machine.host}: {profile.machine.s_worker}")
    print(HEADER, flush=True)
    rows: list[ValidatedRow] = []
    with validation(config, profile) as measuring, _bar(len(todo)) as bar:
        for row in measuring.run(todo, bar.update):
            rows.append(row)
            tqdm.write(table_line(row, profile.shape.num_heads), file=sys.stdout)
            sys.stdout.flush()
        print(error_line(rows), flush=True)
        if args.plot:
            plot_rows(rows, args.plot)
        offline = add_offline(rows, measuring.offline, args.output_json)
    print(offline_line(offline))
    return 0


def add_offline(rows: Sequence[ValidatedRow], offline: Callable[[], OfflineRun], path: str | None) -> OfflineRun:
    """What ``offline`` measured, with the rows in ``path`` if there is one.

    The rows, which took longest, are written before it, so that they are there whatever becomes of it.
    """
    _write_figures(rows, None, path)
    found = offline()
    _write_figures(rows, found, path)
    return found


def _write_figures(rows: Sequence[ValidatedRow], offline: OfflineRun | None, path: str | None) -> None:
    from fastdecode.bench.validate_table import row_figures

    if path:
        figures = {"configurations": [row_figures(row) for row in rows], "offline": vars(offline) if offline else None}
        Path(path).write_text(json.dumps(figures, indent=2) + "\n")


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
