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
        help="API to send requests to: completions or chats (openai)",
    )  # fmt: skip
    group.add_argument("--base-url", metavar="URL", help="URL of the server (http://HOST:PORT)")
    group.add_argument("--host", default="127.0.0.1", help="host of the server (127.0.0.1)")
    group.add_argument("--port", type=int, default=8000, help="port of the server (8000)")
    group.add_argument(
        "--endpoint", metavar="PATH", help="path of requests (/v1/completions; with openai-chat /v1/chat/completions)"
    )
    group.add_argument("--model", metavar="NAME", help="model of the tokenizer (the first that the server names)")
    group.add_argument("--served-model-name", metavar="NAME", help="name of the model in requests (--model)")
    group.add_argument(
        "--tokenizer", metavar="PATH_OR_ID", help="tokenizer (the one of the server's model folder, else of --model)"
    )
    group.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE", help="header that every request has")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=0, metavar="SECONDS",
        help="longest wait for the server to become ready (0)",
    )  # fmt: skip
    _add_workload_flags(parser)
    _add_output_flags(parser)
    add_common_flags(parser)
    add_bench_flags(parser)


def _add_workload_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("workload")
    group.add_argument(
        "--dataset-name", default="random", choices=["random", "sharegpt", "custom"],
        help="source of the requests (random)",
    )  # fmt: skip
    group.add_argument("--dataset-path", metavar="FILE", help="ShareGPT JSON, or JSONL with a text prompt per line")
    add_flags(group, WorkloadSpec, (*LENGTHS, *ARRIVALS), num_prompts={"unset": "1000"})
    group.add_argument("--ramp-up-strategy", choices=RAMPS, help="how the request rate grows (it is constant)")
    for name, when in (("start", "first"), ("end", "last")):
        group.add_argument(
            f"--ramp-up-{name}-rps", type=float, metavar="RATE", help=f"requests per second at the {when} request"
        )
    group.add_argument("--max-concurrency", type=int, metavar="N", help="most requests in progress at once (no limit)")
    group.add_argument(
        "--num-warmups", type=int, default=0, metavar="N", help="requests to send before the measured ones (0)"
    )
    group.add_argument(
        "--ignore-eos", action="store_true", help="generate the full output length (always on for random)"
    )
    group.add_argument("--logprobs", type=int, metavar="K", help="likeliest tokens to request per position (none)")
    for name in SAMPLING:
        kind = int if name == "top_k" else float
        group.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar="X", help="(the server's default)")
    group.add_argument(
        "--chat-template-kwargs", type=json_object, metavar="JSON",
        help="arguments of the chat template, with openai-chat (none)",
    )  # fmt: skip
    group.add_argument(
        "--extra-body", type=json_object, default={}, metavar="JSON", help="further fields of each request"
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--percentile-metrics", default="ttft,tpot,itl,e2el", metavar="LIST",
        help="metrics to show percentiles of (%(default)s)",
    )  # fmt: skip
    group.add_argument("--metric-percentiles", default="99", metavar="LIST", help="percentiles to show (99)")
    group.add_argument(
        "--goodput", nargs="+", default=[], metavar="NAME:MS",
        help="limits in ms for goodput, of ttft, tpot or e2el, such as ttft:500 tpot:100",
    )  # fmt: skip
    group.add_argument("--save-result", action="store_true", help="write every figure to a JSON file")
    group.add_argument(
        "--save-detailed", action="store_true", help="with --save-result: also the figures of each request"
    )
    group.add_argument("--result-dir", default=".", metavar="FOLDER", help="folder for the JSON file (the current one)")
    group.add_argument(
        "--result-filename", metavar="FILE",
        help="name of the JSON file ({label}-{request_rate}qps-{model}-{date}.json)",
    )  # fmt: skip
    group.add_argument("--label", help="beginning of the JSON file's name (--backend)")
    group.add_argument("--metadata", nargs="*", default=[], metavar="NAME=VALUE", help="further keys of the JSON file")
    group.add_argument("--disable-tqdm", action="store_true", help="show no progress bar")
