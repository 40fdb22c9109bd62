"""``fastdecode serve``: the OpenAI API over one engine."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import os
from typing import Any

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cli.flags import add_common_flags, add_engine_flags, add_flags, engine_config
from fastdecode.core.errors import ConfigError
from fastdecode.server.server_settings import SERVER, ServerSettings

NEEDED = ("fastapi", "uvicorn", "httptools", "prometheus_client")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="answer OpenAI clients over HTTP")
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="the same as --model")
    names = [each.name for each in dataclasses.fields(ServerSettings)]
    add_flags(parser.add_argument_group(SERVER), ServerSettings, names)
    add_engine_flags(parser)
    add_common_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """0 after SIGTERM, 130 after Ctrl-C, 1 when the engine has failed."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(f"serve needs {missing[0]}, which is not installed: pip install 'fastdecode[serve]'")
    if args.model_tag:
        if args.model != str(DEMO_MODEL) and args.model != args.model_tag:
            raise ConfigError(f"serve: {args.model_tag!r} and --model {args.model!r} are two models: give one")
        args.model = args.model_tag
    given = {each.name: getattr(args, each.name) for each in dataclasses.fields(ServerSettings)}
    if given["api_key"] is None:
        given["api_key"] = os.environ.get("FASTDECODE_API_KEY")
    settings = ServerSettings(**given)
    if settings.standby is not None:
        if args.session not in (None, settings.standby):
            raise ConfigError(f"serve: --session {args.session!r} and --standby {settings.standby!r}: give one")
        args.session = settings.standby
    config = dataclasses.replace(engine_config(args), stands_by=settings.standby is not None)
    from fastdecode.server.run import serve

    return serve(config, settings)
