"""The flags of ``fastdecode bench serve``, with vLLM's names."""

from __future__ import annotations

import argparse

from fastdecode.cli.flags import add_common_flags, add_flags, json_object
from fastdecode.perfmodel.lab.cli.vllm_bench import add_bench_flags
from fastdecode.perfmodel.lab.measure.dataset import (
    ARRIVALS,
    LENGTHS,
    RAMPS,
    WorkloadSpec,
)

ENDPOINTS = {"openai": "/v1/completions", "openai-chat": "/v1/chat/completions"}


SAMPLING = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
"""Flags that are set in every request, if given."""


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add all flags of the command."""
    group = parser.add_argument_group("server")
    group.add_argument(
        "--backend", default="openai", choices=[*ENDPOINTS], type=lambda name: "openai" if name == "vllm" else name,
        help="completions or chats (openai)",
    )  # fmt: skip
    group.add_argument("--base-url", metavar="URL", help="(http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="(127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="(8000)")
    group.add_argument("--endpoint", metavar="PATH", help="(/v1/completions; of openai-chat /v1/chat/completions)")
    group.add_argument("--model", metavar="NAME", help="(the first that the server names)")
    group.add_argument("--served-model-name", metavar="NAME", help="its name in requests (--model)")
    group.add_argument("--tokenizer", metavar="PATH_OR_ID", help="(where the server says its model is, else --model)")
    group.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="of every request")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, metavar="SECONDS", help="wait for the server (0)"
    )
    _add_workload_flags(parser)
    _add_output_flags(parser)
    add_common_flags(parser)
    add_bench_flags(parser)


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument("--dataset-name", default="random", choices=["random", "sharegpt", "custom"], help="(random)")
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT JSON, or JSONL with a text prompt per line")
    add_flags(group, WorkloadSpec, (*LENGTHS, *ARRIVALS), num_prompts={"unset": "1000"})
    group.add_argument("--ramp-up-strategy", choices=RAMPS, help="requests come faster and faster (at one rate)")
    for name, when in (("start", "first"), ("end", "last")):
        group.add_argument(
            f"--ramp-up-{name}-rps", type=float, metavar="RATE", help=f"per second at the {when} request"
        )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="requests under way at once (no bound)")
    group.add_argument("--num-warmups", type=int, default=0, metavar="N", help="requests before the measured ones (0)")
    group.add_argument("--ignore-eos", action="store_true", help="always the whole output (of random: always on)")
    group.add_argument("--logprobs", type=int, metavar="K", help="ask for them (none)")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="(the server's default)")
    group.add_argument("--chat-template-kwargs", type=json_object, metavar="JSON", help="of openai-chat (none)")
    group.add_argument("--extra-body", type=json_object, default={}, metavar="JSON", help="more fields of each request")


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST", help="(%(default)s)")
    group.add_argument("--metric-percentiles", default="99", metavar="LIST", help="(99)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS", help="objectives of ttft, tpot, e2el: ttft:500 tpot:100"
    )
    group.add_argument("--save-result", action="store_true", help="write every figure as JSON")
    group.add_argument("--save-detailed", action="store_true", help="in it, also what each request got")
    group.add_argument("--result-dir", default=".", metavar="FOLDER", help="(this one)")
    group.add_argument("--result-filename", metavar="FILE", help="({label}-{request_rate}qps-{model}-{date}.json)")
    group.add_argument("--label", help="begins the file's name (--backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="more keys of the JSON")
    group.add_argument("--disable-tqdm", action="store_true", help="no progress bar")
