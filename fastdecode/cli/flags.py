"""Flags that several commands share, generated from the fields of the settings classes.

A flag that vLLM has too keeps vLLM's name and meaning.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, fields
from functools import partial
from typing import Any

from fastdecode.api.config import EngineConfig, flag_names, prefill_settings
from fastdecode.api.engine_fields import BATCHING, MAX_THREADS, MODEL, WORKERS
from fastdecode.api.from_vllm import OF_ENGINES, as_ours
from fastdecode.api.settings import describe_security, split_address
from fastdecode.api.vllm import environment
from fastdecode.api.vllm.values import COUNTS, DTYPE_SETTINGS, read_count, translate
from fastdecode.cli.config_file import CONFIG
from fastdecode.cli.output import check_output_files
from fastdecode.cli.parser import add_switch
from fastdecode.cli.vllm_flags import HIDDEN, add_foreign_flags, add_shortcuts, flag_of
from fastdecode.core.errors import ConfigError
from fastdecode.core.machine import mend_binding, usable_cores
from fastdecode.core.optional import optional
from fastdecode.engine.compose.backends import prepare

logger = logging.getLogger(__name__)

SCHEDULE = ("max_num_seqs", "max_num_batched_tokens", "block_size", "schedule", "kv_load_limit", "micro_batch_interval")
"""The scheduler's settings, which the engine and the simulator share."""

PLACING = ("kv_shard_tokens", "kv_replicas")
"""Settings that place sequences' KV caches on R-workers, which engine, planner and simulator share."""

PREFILL_MODEL = tuple(name for name in prefill_settings() if name != "seed" and "tokenizer" not in name)
"""Flags of prefill workers; ``--seed`` is a common flag."""


def add_flags(group: Any, kind: type, names: Iterable[str], **changes: dict[str, str]) -> None:
    """Add a flag for each field in ``names`` of the dataclass ``kind``. ``changes``: replaced help texts by field."""
    known = {each.name: each for each in fields(kind)}
    for name in names:
        _add_flag(group, known[name], changes.get(name, {}))


def add_placing_flags(group: Any, unset: str) -> None:
    """Add ``--kv-shard-tokens`` and ``--kv-replicas``. ``unset``: help text for the default of the former."""
    add_flags(group, EngineConfig, PLACING, kv_shard_tokens={"unset": unset})


def add_common_flags(parser: argparse.ArgumentParser) -> None:
    """Add ``--log-level``, ``--debug`` and ``--seed``."""
    group = parser.add_argument_group("common")
    told = os.environ.get(environment.LOG_LEVEL, "").lower()
    log_levels = ("debug", "info", "warning", "error", "critical")
    level = told if told in log_levels else "warning"
    group.add_argument(
        "--log-level", type=str.lower, default=level, choices=log_levels,
        help=f"level of log messages ({environment.LOG_LEVEL}, or warning)",
    )  # fmt: skip
    group.add_argument("--debug", action="store_true", help="print a traceback on failure")
    group.add_argument(
        "--seed", type=_seed, default=0, help="seed of random weights, data and unseeded requests (%(default)s)"
    )


def add_engine_flags(parser: argparse.ArgumentParser) -> None:
    """Add one flag per field of ``EngineConfig``, and vLLM's engine flags that FastDecode has no setting for."""
    parser.add_argument(
        CONFIG, metavar="FILE", help="YAML file with flags of this command; flags on the command line override them"
    )
    for title in (MODEL, BATCHING, WORKERS):
        add_flags(parser.add_argument_group(title), EngineConfig, flag_names(title))
    add_foreign_flags(parser, OF_ENGINES)
    parser.add_argument("--kv-cache-memory-bytes", dest="kv_cache_memory", type=count, **HIDDEN)
    add_shortcuts(parser)


def add_calibrated_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that choose what to measure for a hardware profile: the model, and where R-workers run."""
    group = parser.add_argument_group("model and R-workers")
    add_flags(
        group, EngineConfig, [*flag_names(MODEL), "kv_cache_dtype", "r_workers", "key_file", "security"],
        kv_cache_dtype={"help": "of --quick; else all are measured"},
        r_workers={"help": "inproc or spawn: those of this machine; host:port,host:port: listening R-workers"},
    )  # fmt: skip


def engine_config(args: argparse.Namespace) -> EngineConfig:
    """Return the EngineConfig that the parsed flags ``args`` describe. A ConfigError names the bad flag.

    If this process belongs to an MPI job, it joins the job here, before it loads a model.
    """
    if args.r_workers == "mpi" or str(getattr(args, "prefill_workers", "")).startswith("mpi:"):
        say_mended()
    check_output_files(getattr(args, "trace", None))
    if args.model_impl != "vllm" and (sentence := environment.said()):
        logger.warning("%s", sentence)
    names = {field.name for field in fields(EngineConfig)}
    config = EngineConfig(**{name: value for name, value in as_ours(vars(args)).items() if name in names})
    if config.profile:
        optional("profile").load_profile(config.profile)  # refuses a broken profile before the model is loaded
    if config.tensor_parallel_size > 1:
        place = optional("rank place").find_place(config.tensor_parallel_size)
        if place and place.index:
            optional("ranks").serve(config, place)
    prepare(config)
    if config.r_worker_spec.kind == "tcp" or config.pool_listen:
        where = f"that join at {config.pool_listen}" if config.pool_listen else f"at {config.r_workers}"
        guard = describe_security(config.security, config.key_file)
        print(f"fastdecode: R-workers {where} ({guard})", file=sys.stderr, flush=True)
    return config


def add_worker_flags(parser: argparse.ArgumentParser, listen: str) -> None:
    """Add the flags that R-workers and prefill workers share. ``listen``: the default of --listen."""
    parser.add_argument(
        "--listen",
        metavar="ADDRESS",
        help=f"address to listen at; port 0: any free port ({listen}; with --join: any port of the "
        "interface that reaches it)",
    )
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads (one per core)")
    parser.add_argument(
        "--cores", metavar="LIST", help="cores to use, such as 0,2-3 (every core that the process may use)"
    )
    parser.add_argument(
        "--key-file", metavar="FILE",
        help="file with the secret that is shared with the S-worker, mode 0600; needed between machines",
    )  # fmt: skip
    add_flags(parser, EngineConfig, ["security"])
    parser.add_argument(
        "--transport", default="tcp", choices=["tcp", "mpi"], help="tcp, or mpi for a rank of an MPI job (tcp)"
    )
    parser.add_argument(
        "--join", metavar="HOST:PORT", help="--pool-listen address of an S-worker whose running job this worker joins"
    )


def model_words(words: Sequence[str]) -> list[str]:
    """Return those flags in the S-worker's ``words`` that prefill workers need too: about the model, and --seed."""
    known = {flag_of(each.name): each for each in fields(EngineConfig) if each.name in (*PREFILL_MODEL, "seed")}
    found: list[str] = []
    for index, word in enumerate(words):
        flag, assigned, _ = word.partition("=")
        if flag in known:
            is_switch = isinstance(known[flag].default, bool)
            found += [word] if assigned or is_switch else words[index : index + 2]
    return found


def check_threads(threads: int | None) -> None:
    """Raise ConfigError for an impossible number of threads."""
    if threads is not None and not 1 <= threads <= MAX_THREADS:
        raise ConfigError(f"threads must be 1 to {MAX_THREADS}, not {threads}")


def check_cores(cores: list[int] | None) -> None:
    """Raise ConfigError if ``cores`` has core numbers that this process may not use."""
    missing = sorted(set(cores or ()) - set(usable_cores()))
    if missing:
        raise ConfigError(f"cores: this process may not use {missing}; it has {usable_cores()}")


def check_transport(transport: str, join: str | None) -> None:
    """Raise ConfigError if the options combine ``--transport mpi`` with ``--join``."""
    if join and transport == "mpi":
        raise ConfigError("join: an MPI job has the ranks it was started with; leave --transport out")


def listen_address(text: str) -> tuple[str, int]:
    """Return the host and port of "tcp://HOST:PORT". Raise ConfigError for anything else."""
    if not text.startswith("tcp://"):
        raise ConfigError(f"listen: must be tcp://HOST:PORT, not {text!r}")
    host, port = split_address("listen", text.removeprefix("tcp://"), least_port=0)
    return ("127.0.0.1" if host == "localhost" else host), port


def say_mended() -> None:
    """Undo a launcher's binding of this process to a single core, and print that on stderr."""
    mended = mend_binding()
    if mended:
        print(f"fastdecode: {mended}", file=sys.stderr, flush=True)


def _add_flag(group: Any, field: Field[Any], changes: dict[str, str]) -> None:
    told = {**field.metadata, **changes}
    default: Any = field.default if field.default_factory is MISSING else field.default_factory()
    switch = isinstance(default, bool)
    shown = told["unset"] or (("off", "on")[default] if switch else default)
    settings: dict[str, Any] = {"default": default, "help": f"{told['help']} ({shown})".strip().replace("%", "%%")}
    if switch:
        add_switch(group, flag_of(field.name), dest=field.name, **settings)
        return
    settings |= {"type": _reader(field), "choices": told["choices"], "metavar": told["metavar"]}
    if str(field.type).startswith("list"):
        settings |= {"nargs": "+", "action": "extend"}
    group.add_argument(*map(flag_of, (field.name, *told["also"])), dest=field.name, **settings)
    # vLLM's short flags, by setting
    shorts = {"quantization": ("-q",), "tensor_parallel_size": ("-tp",), "speculative_config": ("-sc",)}
    for short in shorts.get(field.name, ()):
        group.add_argument(short, dest=field.name, **settings | HIDDEN)


def _reader(field: Field[Any]) -> Callable[[str], Any]:
    """Return the function that converts a flag's text to the type of ``field``."""
    if field.name in DTYPE_SETTINGS or field.name == "load_format":
        return partial(_translated, field.name)
    if field.name in COUNTS:
        return auto_count if "None" in str(field.type) else count
    # Converters from a flag's text to a field's type, by annotation
    readers: dict[str, Callable[[str], Any]] = {
        "str": str,
        "str | None": str,
        "int | str | None": str,
        "int": int,
        "int | None": auto_int,
        "float": float,
        "float | None": float,
        "dict[str, Any]": json_object,
        "list[str]": str,
        "list[str] | None": str,
    }
    return readers[str(field.type)]


def json_object(text: str) -> dict[str, Any]:
    """Return the JSON object that the flag's text ``text`` holds."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"not valid JSON: {error}; it was {text!r:.80}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f'must be a JSON object such as {{"name": "value"}}, not {text!r:.80}')
    return value


def _translated(name: str, text: str) -> Any:
    """Translate the value ``text`` of flag ``name`` from vLLM's spelling; return FastDecode's own unchanged."""
    try:
        return translate(name, text)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def count(text: str) -> int:
    """Return the integer that a flag's value such as 4096, 4k (4000) or 4K (4096) stands for."""
    try:
        return read_count(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def auto_count(text: str) -> int | None:
    """Return the integer that a flag's value such as 4096 or 4k stands for; None for "auto" and "-1"."""
    return None if text.strip().lower() in ("auto", "-1") else count(text)


def _seed(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 0, not {text!r}")
    return int(text)


def auto_int(text: str) -> int | None:
    """Return the integer that a flag's value stands for; None for "auto"."""
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be auto or a whole number, not {text!r}") from None
