"""Parses vLLM's flags that FastDecode has no setting for, so that it can ignore them with a note or refuse them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from fastdecode.api.from_vllm import OF_SERVERS
from fastdecode.api.vllm.foreign import Foreign
from fastdecode.cli.parser import add_switch

HIDDEN: dict[str, Any] = {"help": argparse.SUPPRESS, "default": argparse.SUPPRESS}
"""Arguments of ``add_argument`` for another spelling of a flag, hidden from help and without a default."""


def flag_of(name: str) -> str:
    """Return the flag of the setting ``name``: dashes for underscores."""
    return f"--{name.replace('_', '-')}"


def add_shortcuts(parser: argparse.ArgumentParser) -> None:
    """Add to ``parser`` vLLM's flags that each set one key of ``--speculative-config``."""
    parser.add_argument("--spec-method", **HIDDEN)
    parser.add_argument("--spec-model", **HIDDEN)
    parser.add_argument("--spec-tokens", type=int, **HIDDEN)


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add vLLM's server flags that FastDecode has no setting for."""
    add_foreign_flags(parser, OF_SERVERS)


def add_foreign_flags(parser: argparse.ArgumentParser, foreign: Mapping[str, Foreign]) -> list[str]:
    """Add vLLM's flags, hidden from help, except those that the command defines itself; return the added names."""
    added = []
    # argparse's nargs by ``Foreign.values``, which says how many words follow a flag
    nargs = {"many": "*", "maybe": "?"}
    for each in foreign.values():
        flags = [flag for flag in (flag_of(each.name), *each.shorts) if flag not in parser._option_string_actions]
        if not flags or flags[0] != flag_of(each.name):
            continue
        added.append(each.name)
        if each.values == "none":
            add_switch(parser, *flags, dest=each.name, help=argparse.SUPPRESS)
        else:
            told: dict[str, Any] = {"nargs": nargs.get(each.values), "const": True if each.values == "maybe" else None}
            parser.add_argument(*flags, dest=each.name, help=argparse.SUPPRESS, **told)
    return added
