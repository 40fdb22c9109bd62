"""The flags that commands share, of the workload and of the engine; names and meaning are vLLM's where it has them."""

from __future__ import annotations

import argparse
import json
import math
import sys
from dataclasses import fields
from typing import Any

from fastdecode.addresses import SECURITY_LEVELS, describe_security
from fastdecode.backends import prepare
from fastdecode.binding import mend_binding
from fastdecode.cli.output import check_output_files
from fastdecode.config import (
    BLOCK_SIZES,
    DEVICES,
    DTYPES,
    KV_CACHE_DTYPES,
    SCHEDULES,
    EngineConfig,
)
from fastdecode.types import ISAS

DEFAULTS: dict[str, Any] = {
    field.name: field.default for field in fields(EngineConfig) if isinstance(field.default, int | str | type(None))
}


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """``--log-level``, ``--debug`` and ``--seed``."""
    group = parser.add_argument_group("common")
    group.add_argument(
        "--log-level", default="warning", choices=["debug", "info", "warning", "error"], help="(warning)"
    )
    group.add_argument("--debug", action="store_true", help="print a traceback on failure")
    group.add_argument("--seed", type=_seed, default=0, help="seed of random weights, data and unseeded requests (0)")


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """One flag per field of ``EngineConfig``."""
    _add_model_flags(parser.add_argument_group("model"))
    _add_batch_flags(parser.add_argument_group("batching"))
    _add_worker_flags(parser.add_argument_group("S-worker and R-workers"))


def add_calibrated_flags(parser: argparse.ArgumentParser) -> None:
    """What a profile depends on: the model, and where the R-workers are."""
    group = parser.add_argument_group("model and R-workers")
    _add_model_flags(group)
    group.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="of --quick; else all are measured (auto)"
    )
    group.add_argument(
        "--r-workers", default="inproc", metavar="SPEC",
        help="inproc or spawn: those of this machine; host:port,host:port: listening R-workers (inproc)",
    )  # fmt: skip
    group.add_argument("--key-file", metavar="FILE", help="secret shared with R-workers at host:port, mode 0600")
    add_security_flag(group)


def add_workload_flags(
    group: Any,
    num_prompts: int | None = 64,
    num_prompts_help: str = "(64)",
    request_rate: float | None = math.inf,
    request_rate_help: str = "(inf: all at once)",
) -> None:
    """Lengths of the random dataset, how many requests, and when they arrive."""
    group.add_argument("--random-input-len", type=int, default=1024, metavar="TOKENS", help="(1024)")
    group.add_argument("--random-output-len", type=int, default=128, metavar="TOKENS", help="(128)")
    group.add_argument(
        "--random-range-ratio", type=float, default=0.0, metavar="R", help="lengths within ± this part (0)"
    )
    group.add_argument("--random-prefix-len", type=int, default=0, metavar="TOKENS", help="shared by all prompts (0)")
    group.add_argument("--num-prompts", type=int, default=num_prompts, help=num_prompts_help)
    group.add_argument(
        "--request-rate", type=float, default=request_rate, help=f"Poisson arrivals per second {request_rate_help}"
    )


def add_security_flag(group: Any) -> None:
    """``--security``, which both sides give alike."""
    group.add_argument(
        "--security", choices=SECURITY_LEVELS,
        help="with --key-file, alike on both sides: authenticate is faster, and whoever is on the network can read all "
        "(encrypt)",
    )  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """The configuration the flags describe; ConfigError names the flag that cannot work.

    A process of an MPI job takes its place in it here, before a model is loaded.
    """
    if args.r_workers == "mpi":
        say_mended()
    check_output_files(getattr(args, "trace", None))
    names = {field.name for field in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in vars(args).items() if name in names})
    prepare(config)
    if config.r_worker_spec.kind == "tcp" or config.pool_listen:
        where = f"that join at {config.pool_listen}" if config.pool_listen else f"at {config.r_workers}"
        guard = describe_security(config.security, config.key_file)
        print(f"fastdecode: R-workers {where} ({guard})", file=sys.stderr, flush=True)
    return config


def say_mended() -> None:
    """Undo a launcher's binding to a single core, and say so."""
    mended = mend_binding()
    if mended:
        print(f"fastdecode: {mended}", file=sys.stderr, flush=True)


def _add_model_flags(group: Any) -> None:
    group.add_argument("--model", default=DEFAULTS["model"], metavar="PATH_OR_ID", help="(the demo model)")
    group.add_argument("--tokenizer", metavar="PATH_OR_ID", help="(the model's)")
    group.add_argument("--revision", help="branch, tag or commit of a model id")
    group.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model (off)")
    group.add_argument("--skip-tokenizer-init", action="store_true", help="prompts are token ids, outputs too (off)")
    group.add_argument("--load-format", default="auto", choices=["auto", "dummy"], help="dummy: random weights (auto)")
    group.add_argument(
        "--hf-overrides", type=_json_object, default={}, metavar="JSON", help="configuration keys to replace"
    )
    group.add_argument("--dtype", default="auto", choices=DTYPES, help="of the weights (auto: the model's)")
    group.add_argument(
        "--device", default="auto", choices=DEVICES, help="of the S-worker (auto: cuda where there is a GPU, else cpu)"
    )
    group.add_argument("--enforce-eager", action="store_true", help="on a GPU, decode without CUDA graphs (off)")
    group.add_argument("--max-model-len", type=int, metavar="TOKENS", help="longest prompt + output (the model's)")


def add_schedule_flags(group: Any) -> None:
    """What the scheduler goes by, in the engine and in the simulator."""
    group.add_argument(
        "--max-num-seqs", type=int, default=DEFAULTS["max_num_seqs"], metavar="N", help="sequences in flight (256)"
    )
    group.add_argument(
        "--max-num-batched-tokens", type=int, default=DEFAULTS["max_num_batched_tokens"], metavar="TOKENS",
        help="token budget of a whole step (2048)",
    )  # fmt: skip
    group.add_argument(
        "--block-size", type=int, default=DEFAULTS["block_size"], choices=BLOCK_SIZES, help="tokens per KV block (32)"
    )
    group.add_argument(
        "--schedule", default="sls", choices=SCHEDULES,
        help="load-stabilizing and stall-free (sls), or one to compare it with",
    )  # fmt: skip
    group.add_argument(
        "--kv-load-limit", type=_auto_int, metavar="TOKENS",
        help="KV tokens attended per step, over all R-workers (auto: where R time equals S time, by --profile, in "
        "simulations by the model, or as measured in the first steps)",
    )  # fmt: skip
    group.add_argument(
        "--micro-batch-interval", type=_auto_int, metavar="STEPS",
        help="between the starts that sls spreads (auto: a 32nd of an output)",
    )  # fmt: skip


def _add_batch_flags(group: Any) -> None:
    add_schedule_flags(group)
    group.add_argument(
        "--num-mini-batches", type=_auto_int, metavar="K", help="(auto: 2 where an R-worker has its own cores, else 1)"
    )
    group.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="(auto: the model's)")
    group.add_argument(
        "--kv-cache-memory", metavar="BYTES", help="per R-worker, such as 4GiB (40%% of what is free, shared)"
    )
    group.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction, default=True,
        help="reuse the KV of equal beginnings (on; off for the random dataset)",
    )  # fmt: skip
    group.add_argument(
        "--profile",
        metavar="FILE",
        help="what `fastdecode calibrate` measured here: gives the load limit and step times",
    )
    group.add_argument(
        "--tbt-target", type=float, metavar="SECONDS",
        help="time between tokens that prompts may cause: sls and stall-free lower the token budget to meet it (none)",
    )  # fmt: skip
    group.add_argument(
        "--prefill-scratch",
        metavar="BYTES",
        help="KV of prompts in progress on the S-worker (an eighth of what is free; none where R-workers that store "
        "KV in the model's dtype share its cores: prompts attend on them then)",
    )


def _add_worker_flags(group: Any) -> None:
    group.add_argument(
        "--r-workers", default="inproc", metavar="SPEC",
        help="inproc:N, in this process; spawn:N, processes here; host:port,host:port, listening R-workers; "
        "mpi, the other ranks of this mpirun (inproc)",
    )  # fmt: skip
    group.add_argument(
        "--pool-listen", metavar="HOST:PORT", help="where R-workers may join while the job runs (nowhere)"
    )
    group.add_argument("--key-file", metavar="FILE", help="secret shared with R-workers at host:port, mode 0600")
    add_security_flag(group)
    group.add_argument(
        "--uniform-arithmetic", default="auto", choices=("auto", *ISAS), metavar="ISA",
        help="in which all R-workers attend, so that results depend on none of them: scalar, avx2, avx512, … "
        "(auto: each in its fastest)",
    )  # fmt: skip
    group.add_argument("--r-threads", type=int, metavar="N", help="per R-worker (its cores)")
    group.add_argument("--s-threads", type=int, metavar="N", help="(its cores)")
    group.add_argument(
        "--s-cores",
        metavar="LIST",
        help="such as 0,2-3 (every core; of spawn, what --r-cores leaves)",
    )
    group.add_argument("--r-cores", metavar="LIST", help="such as 4-7 (every core)")
    group.add_argument("--trace", metavar="FILE", help="write Chrome trace events")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError('must be a JSON object such as {"num_hidden_layers": 4}')
    return value


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def _auto_int(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be auto or a whole number, not {text!r}") from None
