"""``fastdecode bench serve``: the latencies that clients of an OpenAI-compatible server see, as in vLLM.

The client needs neither torch nor the model, only the model's tokenizer.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import os
import time
from dataclasses import replace
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fastdecode.cli.output import check_output_files, progress_bar, write_json
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.lab.cli.bench_serve_flags import ENDPOINTS, SAMPLING, add_server_flags
from fastdecode.perfmodel.lab.cli.vllm_bench import check_bench_flags
from fastdecode.perfmodel.lab.measure.dataset import (
    RampUp,
    WorkItem,
    WorkloadSpec,
    make_workload,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from fastdecode.perfmodel.lab.measure.serving import ServedRequest, Target


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="latency and throughput of a running OpenAI-compatible server")
    add_server_flags(parser)
    parser.set_defaults(run=run, num_prompts=1000)


def run(args: argparse.Namespace) -> int:
    """Send the requests and print vLLM's table; after Ctrl-C, cover only finished requests. Return 1 if all failed."""
    check_bench_flags(args)
    if find_spec("aiohttp") is None:
        raise ConfigError("bench serve needs aiohttp: pip install 'fastdecode[serve]'")
    from fastdecode.perfmodel.lab.measure.serving import UNFINISHED
    from fastdecode.perfmodel.lab.measure.serving_report import (
        DETAILS,
        parse_goodput,
        parse_metrics,
        parse_percentiles,
        serving_report,
        table_lines,
    )

    wanted = parse_goodput(args.goodput), parse_metrics(args.percentile_metrics)
    percentiles = parse_percentiles(args.metric_percentiles)
    metadata = _pairs("metadata", args.metadata)
    spec, ramp_up = _spec(args), _ramp_up(args)
    target, model = _target(args)
    result_file = _result_file(args, model["id"])
    items = _items(args, spec, ramp_up, target, model)
    served: list[ServedRequest] = []
    duration, interrupted = _run_load(args, target, items, served)
    if interrupted:
        served = [request for request in served if request.error != UNFINISHED]
    report = _settings(args, spec, model) | metadata | serving_report(served, duration, *wanted, percentiles)
    _print_errors(served)
    print(*table_lines(report, wanted[1]), sep="\n", flush=True)
    kept = {key: value for key, value in report.items() if args.save_detailed or key not in DETAILS}
    write_json(kept, result_file)
    if interrupted:
        raise interrupted
    return int(report["completed"] == 0)


def _spec(args: argparse.Namespace) -> WorkloadSpec:
    if args.max_concurrency is not None and args.max_concurrency < 1:
        raise ConfigError(f"max_concurrency must be at least 1, not {args.max_concurrency}")
    if args.num_warmups < 0:
        raise ConfigError(f"num_warmups must be 0 or more, not {args.num_warmups}")
    return WorkloadSpec(**{name: getattr(args, name) for name in WorkloadSpec.__dataclass_fields__})


def _ramp_up(args: argparse.Namespace) -> RampUp | None:
    """Return the ramp-up, if any. Raise ConfigError if flags conflict."""
    rates = args.ramp_up_start_rps, args.ramp_up_end_rps
    if args.ramp_up_strategy is None:
        if rates != (None, None):
            raise ConfigError("ramp_up_start_rps and ramp_up_end_rps need a --ramp-up-strategy")
        return None
    if None in rates:
        raise ConfigError("ramp_up_strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
    if not math.isinf(args.request_rate):
        raise ConfigError("ramp_up_strategy and request_rate exclude each other: give one")
    return RampUp(args.ramp_up_strategy, *rates)


def _pairs(name: str, given: list[str]) -> dict[str, str]:
    """Return the pairs of ["NAME=VALUE", …]. Raise ConfigError if an "=" is missing."""
    if wrong := [pair for pair in given if "=" not in pair]:
        raise ConfigError(f"{name} must be NAME=VALUE, not {wrong[0]!r}")
    return {key.strip(): value.strip() for key, _, value in (pair.partition("=") for pair in given)}


def _target(args: argparse.Namespace) -> tuple[Target, dict[str, Any]]:
    """Return the server's address, and how it describes its first model. OPENAI_API_KEY has the API key, as in vLLM."""
    from fastdecode.perfmodel.lab.measure.serving import Target

    key = os.environ.get("OPENAI_API_KEY")
    headers = ({"Authorization": f"Bearer {key}"} if key else {}) | _pairs("header", args.header)
    base_url = (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")
    model = _ready_model(base_url, headers, args.ready_check_timeout_sec)
    model["id"] = args.model or model["id"]
    asked = {name: getattr(args, name) for name in (*SAMPLING, "logprobs") if getattr(args, name) is not None}
    if args.ignore_eos or args.dataset_name == "random":
        asked["ignore_eos"] = True
    kwargs = {} if args.chat_template_kwargs is None else {"chat_template_kwargs": args.chat_template_kwargs}
    return Target(
        url=base_url + (args.endpoint or ENDPOINTS[args.backend]),
        model=args.served_model_name or model["id"],
        chat=args.backend == "openai-chat",
        headers=headers,
        body=asked | kwargs | args.extra_body,
    ), model


def _ready_model(base_url: str, headers: dict[str, str], seconds: float) -> dict[str, Any]:
    """Ask the server for its models once a second; return the first. Raise ServerError after ``seconds``."""
    from fastdecode.perfmodel.lab.measure.serving import ServerError, served_model

    deadline = time.monotonic() + seconds
    while True:
        try:
            return dict(asyncio.run(served_model(base_url, headers)))
        except ServerError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(1)


def _items(
    args: argparse.Namespace, spec: WorkloadSpec, ramp_up: RampUp | None, target: Target, model: dict[str, Any]
) -> list[WorkItem]:
    """Return the requests. Without a ramp-up, the last arrives after ``len(items) / request_rate`` s, as in vLLM."""
    tokenizer = load_tokenizer(args.tokenizer or args.model or model.get("root") or model["id"])
    # Assumed longest context if the server does not report it
    unbounded_tokens = 1 << 60
    longest = model.get("max_model_len") or unbounded_tokens
    items = make_workload(spec, tokenizer.get_vocab_size(), longest, lambda text: tokenizer.encode(text).ids)
    if target.chat:
        items = [replace(each, prompt=each.prompt or tokenizer.decode(each.prompt_token_ids)) for each in items]
    if ramp_up:
        times = ramp_up.arrivals(len(items), spec.burstiness, spec.seed)
        return [replace(each, arrival_seconds=float(time)) for each, time in zip(items, times, strict=True)]
    end = items[-1].arrival_seconds
    stretch = len(items) / spec.request_rate / end if end else 1.0
    return [replace(each, arrival_seconds=each.arrival_seconds * stretch) for each in items]


def load_tokenizer(place: str) -> Tokenizer:
    """Return the tokenizer.json of a model's folder, of a file, or of a model on the Hugging Face hub."""
    from tokenizers import Tokenizer

    path = Path(place) / "tokenizer.json" if Path(place).is_dir() else Path(place)
    try:
        return Tokenizer.from_file(str(path)) if path.is_file() else Tokenizer.from_pretrained(place)
    except Exception as error:  # the library tokenizers raises a plain Exception
        raise ConfigError(
            f"tokenizer: cannot read {path} ({error}); give --tokenizer the folder that has the model's tokenizer.json"
        ) from None


def _run_load(
    args: argparse.Namespace, target: Target, items: list[WorkItem], served: list[ServedRequest]
) -> tuple[float, KeyboardInterrupt | None]:
    """Send warm-up requests, then ``items``, whose results are appended to ``served``.
    Return the seconds that ``items`` took, and the Ctrl-C that ended them, if any.
    """
    from fastdecode.perfmodel.lab.measure.serving import run_load

    warm = [replace(items[0], arrival_seconds=0.0)] * args.num_warmups
    asyncio.run(run_load(target, warm, args.max_concurrency, []))
    start = time.perf_counter()
    interrupted: KeyboardInterrupt | None = None
    with progress_bar(len(items), "req", **({"disable": True} if args.disable_tqdm else {})) as bar:
        try:
            asyncio.run(run_load(target, items, args.max_concurrency, served, bar.update))
        except KeyboardInterrupt as stop:
            interrupted = stop
    return time.perf_counter() - start, interrupted


def _settings(args: argparse.Namespace, spec: WorkloadSpec, model: dict[str, Any]) -> dict[str, Any]:
    ramp_up = ("ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps")
    return {
        "date": datetime.now().strftime("%Y%m%d-%H%M%S"),
        "endpoint_type": args.backend,
        "backend": args.backend,
        "label": args.label,
        "model_id": model["id"],
        "tokenizer_id": args.tokenizer or args.model or model.get("root") or model["id"],
        "num_prompts": spec.num_prompts,
        "request_rate": "inf" if math.isinf(spec.request_rate) else spec.request_rate,
        "burstiness": spec.burstiness,
        "max_concurrency": args.max_concurrency,
        **({name: getattr(args, name) for name in ramp_up} if args.ramp_up_strategy else {}),
    }


def _result_file(args: argparse.Namespace, model: str) -> str | None:
    """Return the path of the results, by default named as vLLM does; raise ConfigError if it is not writable."""
    if not args.save_result:
        return None
    folder = Path(args.result_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"result_dir: {error}") from None
    at_once = "" if args.max_concurrency is None else f"-concurrency{args.max_concurrency}"
    date = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = f"{args.request_rate}qps"
    if args.ramp_up_strategy:
        rate = f"ramp-up-{args.ramp_up_strategy}-{args.ramp_up_start_rps:g}qps-{args.ramp_up_end_rps:g}qps"
    name = f"{args.label or args.backend}-{rate}{at_once}-{model.split('/')[-1]}-{date}.json"
    path = str(folder / (args.result_filename or name))
    check_output_files(path)
    return path


def _print_errors(served: list[ServedRequest], most: int = 10) -> None:
    failed = [request.error for request in served if request.error]
    for error in failed[:most]:
        print(f"Failed request: {error}")
    if len(failed) > most:
        print(f"… and {len(failed) - most} more failed requests")
