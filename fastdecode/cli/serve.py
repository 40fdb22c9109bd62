"""``fastdecode serve``: the OpenAI API over one engine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from pathlib import Path
from typing import Any

from fastdecode.api.config import EngineConfig
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.api.vllm import environment
from fastdecode.cli.flags import add_common_flags, add_engine_flags, add_flags, engine_config
from fastdecode.cli.vllm_flags import add_server_flags, flag_of
from fastdecode.core.errors import ConfigError
from fastdecode.server.server_settings import SERVER, ServerSettings


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer OpenAI clients over HTTP")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="model to serve, as with --model")
    names = [each.name for each in dataclasses.fields(ServerSettings)]
    add_flags(parser.add_argument_group(SERVER), ServerSettings, names)
    add_engine_flags(parser)
    add_server_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run the API server; return the exit status: 0 after SIGTERM, 130 after Ctrl-C, 1 if the engine failed."""
    needed = ("fastapi", "uvicorn", "httptools", "prometheus_client")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {missing[0]}, which is not installed: pip install 'fastdecode[serve]'")
    config, settings = read_settings(args)
    from fastdecode.server.run import serve

    return serve(config, settings)


def read_settings(args: argparse.Namespace) -> tuple[EngineConfig, ServerSettings]:
    """Return the engine's and the server's settings. Raise ConfigError for a bad flag."""
    if args.model_tag:
        if args.model not in (str(DEMO_MODEL), args.model_tag) and "model" not in args.from_file:
            raise ConfigError(f"serve: {args.model_tag!r} and --model {args.model!r} are two models: give one")
        args.model = args.model_tag
    elif args.model == str(DEMO_MODEL):
        _check_no_flag_has_the_model(args)
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(ServerSettings)}
    told = os.environ.get("FASTDECODE_API_KEY", os.environ.get(environment.API_KEY))
    if given["api_key"] is None and told is not None:
        given["api_key"] = [told]
    settings = ServerSettings(**given)
    if settings.standby is not None:
        if args.session not in (None, settings.standby):
            raise ConfigError(f"serve: --session {args.session!r} and --standby {settings.standby!r}: give one")
        args.session = settings.standby
    args.stands_by = settings.standby is not None  # a rank that a launcher started never returns from the next call
    return engine_config(args), settings


def _check_no_flag_has_the_model(args: argparse.Namespace) -> None:
    """Raise ConfigError if a flag that takes several values has swallowed the model's name.

    Otherwise the demo model would be served in its place.
    """
    for name, values in vars(args).items():
        if isinstance(values, list) and len(values) > 1 and _may_be_a_model(str(values[-1])):
            raise ConfigError(
                f"serve: {flag_of(name)} takes several values, and {values[-1]!r} was read as one of them: give the "
                f"model first, as in `serve MODEL {flag_of(name)} …`, or as --model"
            )


def _may_be_a_model(value: str) -> bool:
    return ("/" in value and "://" not in value) or Path(value).exists()
