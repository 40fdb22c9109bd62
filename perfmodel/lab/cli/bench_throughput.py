"""``fastdecode bench throughput``: offline throughput and its breakdown."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from fastdecode.api.config import EngineConfig
from fastdecode.cli.collect_env import machine_facts
from fastdecode.cli.flags import add_common_flags, add_engine_flags, add_flags, engine_config
from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.vllm_bench import add_bench_flags, check_bench_flags
from fastdecode.perfmodel.lab.measure.dataset import ARRIVALS, LENGTHS, WorkItem, WorkloadSpec, make_workload

if TYPE_CHECKING:
    from fastdecode.core.metrics import Tracer
    from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun


Outcome: TypeAlias = tuple[dict[str, Any], BaseException | None, Iterator[str]]
"""The report, an exception to raise after it, and pictures, each drawn when its line is requested."""


def add_command(commands: Any) -> None:
    parser = commands.add_parser("throughput", help="offline throughput of a workload")
    vllms_backends = {"vllm": "fastdecode", "hf": "transformers"}
    parser.add_argument(
        "--backend", default="fastdecode", choices=["fastdecode", "transformers"],
        help="what runs the requests; transformers: static batches (fastdecode)",
        type=lambda name: vllms_backends.get(name, name),
    )  # fmt: skip
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name", default="random", choices=["random", "sharegpt", "custom"],
        help="source of the requests (random)",
    )  # fmt: skip
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT JSON, or JSONL with a text prompt per line")
    add_flags(group, WorkloadSpec, (*LENGTHS, *ARRIVALS))
    group = parser.add_argument_group("output")
    group.add_argument("--output-json", metavar="FILE", help="file to write every figure to")
    group.add_argument("--plot-timeline", metavar="PNG", help="file for a picture: one decode step, a lane per worker")
    group.add_argument("--plot-steps", metavar="PNG", help="file for a picture: KV load and seconds of every step")
    group.add_argument(
        "--measure-overlap", action="store_true", help="also run steps without overlap, in turns with the others"
    )
    add_engine_flags(parser)
    add_common_flags(parser)
    add_bench_flags(parser)
    parser.set_defaults(run=run, enable_prefix_caching=None)


def run(args: argparse.Namespace) -> int:
    """Run the workload and print its throughput; after Ctrl-C, print that of the finished part."""
    if args.enable_prefix_caching is None:  # as in vLLM: off for random prompts
        args.enable_prefix_caching = args.dataset_name != "random"
    check_bench_flags(args)
    config = engine_config(args)
    check_output_files(args.output_json, plots=(args.plot_timeline, args.plot_steps))
    spec = WorkloadSpec(**{name: getattr(args, name) for name in WorkloadSpec.__dataclass_fields__})
    if args.backend == "transformers":
        _refuse_engine_flags(args)
    report, interrupted, pictures = (_run_engine if args.backend == "fastdecode" else _run_transformers)(
        args, config, spec
    )
    rate = "inf" if math.isinf(spec.request_rate) else spec.request_rate  # JSON has no infinity
    report["config"] = {"backend": args.backend, **vars(spec), **vars(config), "request_rate": rate}
    report["machine"] = machine_facts()
    from fastdecode.perfmodel.lab.measure.throughput_report import summary_lines

    for line in summary_lines(report):
        print(line, flush=True)
    write_json(report, args.output_json)
    for line in pictures:
        print(line)
    if interrupted:
        raise interrupted
    return 0


def _refuse_engine_flags(args: argparse.Namespace) -> None:
    given = [name for name in ("plot_timeline", "plot_steps", "measure_overlap", "trace") if getattr(args, name)]
    given += ["request_rate"] if not math.isinf(args.request_rate) else []
    if given:
        raise ConfigError(f"{given[0]} is not for backend transformers, which runs static batches and has no steps")


def _run_engine(args: argparse.Namespace, config: EngineConfig, spec: WorkloadSpec) -> Outcome:
    from fastdecode.engine.engine import LLMEngine
    from fastdecode.perfmodel.lab.measure.throughput import run_throughput, warm_up
    from fastdecode.perfmodel.lab.measure.throughput_report import ThroughputRun, throughput_report

    engine = LLMEngine(config)
    run, tracer = ThroughputRun(), None
    interrupted: BaseException | None = None
    try:
        if args.measure_overlap and engine.num_mini_batches < 2:
            raise ConfigError("measure_overlap: with one mini-batch nothing overlaps; give --num-mini-batches 2")
        model = engine.s_model
        items = make_workload(
            spec, model.vocab_size, model.max_model_len, model.tokenizer.encode if model.tokenizer else None
        )
        _describe(engine, items)
        warm_up(engine, items)
        tracer = engine.world.start_tracing() if args.plot_timeline else None
        with progress_bar(len(items), "req") as bar:
            run_throughput(engine, items, args.measure_overlap, lambda _: bar.update(), run)
    except KeyboardInterrupt as stop:
        interrupted = stop
    finally:
        try:
            engine.close()
        except OSError as unwritten:  # report even if the trace cannot be written
            interrupted = interrupted or unwritten
    report = throughput_report(run, config.separate_cores)
    if "num_hidden_layers" in config.hf_overrides and run.steps:
        report["estimated_full_model"] = _full_model(config, report)
    return report, interrupted, _pictures(args, run, tracer) if run.steps else iter(())


def _pictures(args: argparse.Namespace, run: ThroughputRun, tracer: Tracer | None) -> Iterator[str]:
    """Yield a line per picture that a flag names. Advancing the iterator draws the picture."""
    from fastdecode.perfmodel.lab.measure.plots import plot_steps, plot_timeline, typical_decode_step

    if tracer:
        steps = tracer.steps[-len(run.steps) :]
        plot_timeline(typical_decode_step(steps, run.steps), args.plot_timeline)
        yield f"Timeline of one decode step: {args.plot_timeline}"
    if args.plot_steps:
        plot_steps(run.steps, run.kv_load_limit, args.plot_steps)
        yield f"KV load and seconds of every step: {args.plot_steps}"


def _run_transformers(args: argparse.Namespace, config: EngineConfig, spec: WorkloadSpec) -> Outcome:
    from fastdecode.perfmodel.lab.measure.throughput import run_baseline

    return (*run_baseline(config, spec, partial(progress_bar, unit="req")), iter(()))


def _full_model(config: EngineConfig, report: dict[str, Any]) -> dict[str, Any]:
    from fastdecode.perfmodel.lab.measure.throughput_report import full_model_decode
    from fastdecode.sworker.model.loader import num_layers

    decode = report["decode"]
    tokens_per_step = decode["tokens"] / decode["steps"] if decode["steps"] else 0.0
    return full_model_decode(
        decode["step_seconds_p50"], tokens_per_step, config.hf_overrides["num_hidden_layers"], num_layers(config)
    )


def _describe(engine: Any, items: list[WorkItem]) -> None:
    model, layout, workers = engine.s_model, engine.s_model.layout, engine.r_workers
    tokens = workers[0].num_blocks * workers[0].block_size
    print(
        f"{model.model_type}, {model.num_parameters / 1e6:.1f} M parameters, {len(layout.layers)} layers, "
        f"{layout.model_dtype}, KV {layout.kv_dtype} ({layout.kv_bytes_per_token:,} bytes per token)"
    )
    print(
        f"{len(workers)} R-worker(s) of {workers[0].num_threads} thread(s), {workers[0].isa}, {tokens:,} tokens of KV "
        f"each; {engine.num_mini_batches} mini-batch(es); {len(items)} requests",
        flush=True,
    )
