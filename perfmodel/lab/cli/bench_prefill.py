"""``fastdecode bench prefill``: time to first token by method, number of prefill workers, and context."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fastdecode.api.config import EngineConfig
from fastdecode.cli.flags import add_common_flags, add_engine_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError

if TYPE_CHECKING:
    from fastdecode.perfmodel.lab.measure.prefill_bench import PrefillRow
    from fastdecode.perfmodel.lab.measure.prefill_runs import LivePrefill
    from fastdecode.perfmodel.profile import HardwareProfile

LEAST_LEN = 32
METHODS = ("kvr-e", "kvr-s", "kvr-p", "tsp")


def add_command(commands: Any) -> None:
    parser = commands.add_parser(
        "prefill",
        help="time to first token by method, prefill workers and context",
        description="One prompt at a time on prefill workers (--prefill-workers; spawn:N for the most of --workers "
        "unless given): a chain with even, searched or interpolated parts, and tensor/sequence parallel. Beside the "
        "measured times stand those that the performance model predicts, beside the counted bytes the formula's.",
    )
    group = parser.add_argument_group("measuring")
    group.add_argument(
        "--prefill-lens", default="1024,2048,4096", metavar="LIST",
        help="lengths of the prompts in tokens (1024,2048,4096)",
    )  # fmt: skip
    group.add_argument(
        "--workers", default="1,2", metavar="LIST", help="numbers of prefill workers that share a prompt (1,2)"
    )
    group.add_argument(
        "--methods", default=",".join(METHODS), metavar="LIST",
        help="methods: kvr-e, even parts; kvr-s, searched; kvr-p, interpolated between lengths; tsp "
            "(all)",
    )  # fmt: skip
    group.add_argument("--repeats", type=int, default=3, metavar="N", help="runs of each method, in turns (3)")
    group.add_argument(
        "--search-repeats", type=int, default=1, metavar="N", help="runs of each cut that a search tries (1)"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    group.add_argument("--plot", metavar="PNG", help="file for a picture: times over the context")
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print a row per method, number of workers and length; after Ctrl-C, the rows measured so far."""
    lengths, counts = wholes("prefill_lens", args.prefill_lens, LEAST_LEN), wholes("workers", args.workers, 1)
    methods = _methods(args.methods)
    for name in ("repeats", "search_repeats"):
        if getattr(args, name) < 1:
            raise ConfigError(f"{name} must be at least 1, not {getattr(args, name)}")
    most_workers = 64
    if counts[-1] > most_workers:
        raise ConfigError(f"workers: at most {most_workers}, not {counts[-1]}")
    check_output_files(args.output_json, plots=(args.plot,))
    args.prefill_workers = args.prefill_workers or f"spawn:{counts[-1]}"
    config = bench_config(engine_config(args), lengths[-1])
    spec = config.prefill_worker_spec
    if spec and spec.count < counts[-1]:
        raise ConfigError(f"workers: {counts[-1]} prefill workers are needed, and prefill_workers has {spec.count}")
    from fastdecode.perfmodel.lab.measure.prefill_bench import report
    from fastdecode.perfmodel.lab.measure.prefill_runs import LivePrefill

    rows: list[PrefillRow] = []
    try:
        with closing(LivePrefill(config, args.seed)) as runner:
            measure(runner, config, args, (lengths, counts, methods), rows.append)
    finally:
        if rows:
            _print(rows)
            settings = {name: value for name, value in vars(args).items() if name != "run"}
            write_json(report(rows) | {"config": settings}, args.output_json)
            if args.plot:
                from fastdecode.perfmodel.lab.measure.plots import plot_prefill

                plot_prefill(rows, args.plot)
    return 0


def bench_config(config: EngineConfig, longest: int) -> EngineConfig:
    """Return ``config`` without prefix caching. Raise ConfigError if ``longest`` tokens do not fit max_model_len."""
    if config.max_model_len is not None and config.max_model_len <= longest:
        raise ConfigError(
            f"prefill_lens: {longest} tokens and one more do not fit max_model_len {config.max_model_len}"
        )
    return replace(config, enable_prefix_caching=False, max_model_len=config.max_model_len or longest + 1)


def measure(
    runner: LivePrefill,
    config: EngineConfig,
    args: argparse.Namespace,
    wanted: tuple[list[int], list[int], list[str]],
    take: Callable[[PrefillRow], object],
) -> None:
    """Measure the prefill workers' speeds, unless a profile has them. Then pass each measured row to ``take``.

    ``wanted``: prompt lengths, numbers of prefill workers, and methods."""
    from fastdecode.perfmodel.lab.measure.prefill_bench import PrefillBench, num_measurements

    lengths, counts, methods = wanted
    profile = profile_of(runner, config, lengths, counts, args.repeats)
    bench = PrefillBench(runner, profile, methods, args.repeats, args.search_repeats)
    with progress_bar(num_measurements(methods, lengths, counts, args.repeats), "run") as bar:
        for row in bench.rows(lengths, counts, bar.update):
            take(row)


def profile_of(
    runner: LivePrefill, config: EngineConfig, lengths: list[int], counts: list[int], rounds: int
) -> HardwareProfile:
    """Return the profile of ``--profile`` if it covers prefill workers; else measure their speeds now."""
    from fastdecode.perfmodel.deployment import this_machine
    from fastdecode.perfmodel.lab.measure.prefill_calibrator import measure_rates
    from fastdecode.perfmodel.profile import HardwareProfile
    from fastdecode.perfmodel.profile_json import load_profile
    from fastdecode.sworker.model.loader import device_name
    from fastdecode.sworker.model.shape import model_shape

    given = load_profile(config.profile) if config.profile else None
    if given and given.prefill:
        return given
    rates = measure_rates(runner, lengths, counts, rounds)
    machine = this_machine(device_name(config), config.r_workers, runner.engine.r_workers[0].isa)
    return HardwareProfile(machine, model_shape(config), (), (), prefill=rates)


def _print(rows: list[PrefillRow]) -> None:
    from fastdecode.perfmodel.lab.measure.prefill_bench import report, table_lines

    for line in table_lines(rows):
        print(line, flush=True)
    found = report(rows)
    error = found["prediction_error"]
    equal = "equals the formula" if found["traffic_equals_formula"] else "DIFFERS from the formula"
    print(f"Predicted within {error['median']:.1%} (median; {error['max']:.1%} at most); traffic {equal}")


def wholes(name: str, text: str, least: int) -> list[int]:
    """Return a flag's list of distinct whole numbers in ascending order. Raise ConfigError if it is malformed."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isascii() and part.isdigit() and len(part) < 8 and int(part) >= least for part in parts):
        raise ConfigError(f"{name} must be whole numbers of at least {least} with commas between, not {text!r}")
    return sorted({int(part) for part in parts})


def _methods(text: str) -> list[str]:
    parts = [part.strip() for part in text.split(",")]
    unknown = [part for part in parts if part not in METHODS]
    if unknown:
        raise ConfigError(f"methods must be among {', '.join(METHODS)}, not {unknown[0]!r}")
    return list(dict.fromkeys(parts))
