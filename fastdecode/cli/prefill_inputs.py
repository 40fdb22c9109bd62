"""From the flags of ``plan`` and ``simulate`` to a model of prefill workers."""

from __future__ import annotations

import argparse
from typing import Any

from fastdecode.cli.machine_inputs import BARE_FLAGS, DEFAULT_LINK, named_shape
from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.deployment import check_alike
from fastdecode.perfmodel.hardware import find_gpu, parse_link
from fastdecode.perfmodel.partition import NO_TABLE, Forecast, PartitionTable
from fastdecode.perfmodel.prefill import PrefillLink
from fastdecode.perfmodel.prefill_rates import gpu_prefill_model, measured_prefill_model
from fastdecode.perfmodel.profile_json import load_profile

AUTOMATIC = -1
"""As many prefill workers as keep up."""


def add_prefill_flags(group: Any, automatic: bool) -> None:
    """Prefill workers by name. ``automatic``: whether their number may be "auto"."""
    group.add_argument(
        "--num-prefill-workers", type=_auto_count if automatic else _count, metavar="N",
        help="that compute prompts in place of the S-worker (none)" + ("; auto: as many as keep up" * automatic),
    )  # fmt: skip
    group.add_argument("--prefill-gpu", metavar="NAME", help="of each of them (the S-worker's)")
    group.add_argument("--prefill-link", metavar="RATE", help=f"between them, such as 300GB ({DEFAULT_LINK})")


def prefill_forecast(args: argparse.Namespace) -> Forecast | None:
    """None where there are no prefill workers; ConfigError or ProfileError where nothing says how fast they are."""
    if args.num_prefill_workers is None:
        for name in ("prefill_gpu", "prefill_link"):
            if getattr(args, name):
                raise ConfigError(f"{name} describes prefill workers: it needs --num-prefill-workers beside it")
        return None
    if any(getattr(args, name) is not None for name in BARE_FLAGS):
        raise ConfigError("num_prefill_workers: bare numbers do not say how fast prefill workers are; name the machine")
    if args.profile and not args.prefill_gpu:
        return _measured(args)
    shape, link = named_shape(args.model), parse_link(args.prefill_link or args.link or DEFAULT_LINK)
    gpu = find_gpu(args.prefill_gpu or args.gpu).times(args.tensor_parallel_size)
    return Forecast(gpu_prefill_model(shape, gpu, PrefillLink(link)), NO_TABLE)


def _measured(args: argparse.Namespace) -> Forecast:
    if args.prefill_link:
        raise ConfigError("prefill_link: the profile says how fast the links of its prefill workers are")
    profile = load_profile(args.profile)
    shape = profile.shape
    if args.model:
        shape = named_shape(args.model)
        check_alike(profile, shape)
    return Forecast(
        measured_prefill_model(profile, max(args.num_prefill_workers, 1), shape), PartitionTable(profile.partitions)
    )


def _count(text: str) -> int | None:
    """A whole number; 0 is none."""
    if not (text.isascii() and text.isdigit()) or len(text) > 6:
        raise argparse.ArgumentTypeError(f"must be a whole number of prefill workers, not {text!r}")
    return int(text) or None


def _auto_count(text: str) -> int | None:
    return AUTOMATIC if text == "auto" else _count(text)
