"""Flags of ``plan`` and ``simulate`` that describe a machine: by name, by a measured profile, or by numbers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fastdecode.api.engine_fields import DTYPES, KV_CACHE_DTYPES
from fastdecode.cli.flags import auto_int
from fastdecode.perfmodel.model_sizes import FORMATS
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS, NUMBERS

BARE_FLAGS = ("s_part_seconds", "r_part_seconds_per_token", "num_layers")
"""Settings that give the speed of S-worker and R-workers as bare numbers."""

DEFAULT_LINK = "100Gb"
"""The S-worker's link without --link."""


def add_machine_flags(group: Any) -> None:
    """Add the flags that describe a machine by name, in numbers, or as measured here."""
    group.add_argument(
        "--weights", choices=tuple(FORMATS), metavar="FORMAT",
        help=f"format of the checkpoint: {', '.join(FORMATS)} (by its configuration; plain for models "
            "by name)",
    )  # fmt: skip
    group.add_argument(
        "--quantization", choices=("int8",), help="int8: linear layers of an S-worker on a CPU multiply int8 (off)"
    )
    presets: dict[str, Iterable[str]] = {"gpu": GPUS, "cpu": CPU_HOSTS}
    gpus, hosts = (f"{', '.join(names)}; {NUMBERS[kind]}; here: measured" for kind, names in presets.items())
    group.add_argument(
        "--model", metavar="NAME_OR_PATH", help="model: a name such as llama-7b, a model folder or a config.json"
    )
    group.add_argument("--gpu", metavar="GPU", help=f"GPU of the S-worker: {gpus}")
    group.add_argument(
        "--tensor-parallel-size", type=int, default=1, metavar="N",
        help="ranks of the S-worker, with a GPU and R-workers each (1)",
    )  # fmt: skip
    group.add_argument(
        "--rank-link", metavar="RATE",
        help="bandwidth between ranks, such as 300GB (the GPU's NVLink, or else its PCIe)",
    )  # fmt: skip
    group.add_argument("--cpu", metavar="HOST", help=f"hosts of R-workers: {hosts}")
    group.add_argument(
        "--link", metavar="RATE",
        help=f"bandwidth of the S-worker's link, such as 100Gb or 12.5GB ({DEFAULT_LINK}); pcie: "
            "R-workers run on the GPU's own host",
    )  # fmt: skip
    group.add_argument(
        "--kv-cache-memory", metavar="BYTES",
        help="KV cache of each R-worker, such as 100GiB (80%% of the host's memory, shared)",
    )  # fmt: skip
    group.add_argument(
        "--latent-absorption", default="auto", choices=("s", "r", "auto"),
        help="side that multiplies K and V of latents (auto: the faster one by plan; elsewhere s)",
    )  # fmt: skip
    group.add_argument("--r-workers-per-host", type=int, metavar="N", help="R-workers on each host (one per NUMA node)")


def add_number_flags(group: Any) -> None:
    """Add ``--profile``, and flags that give the speeds of S-worker and R-worker as plain numbers."""
    group.add_argument("--profile", metavar="FILE", help="hardware profile (JSON) of any machine")
    group.add_argument(
        "--s-part-seconds", type=float, metavar="SECONDS", help="T(B): S-worker's time for one layer of one mini-batch"
    )
    group.add_argument(
        "--r-part-seconds-per-token", type=float, metavar="SECONDS", help="R: R-worker's time per token of one layer"
    )
    group.add_argument("--num-layers", type=int, metavar="N", help="number of layers, with the two flags above")


def add_pipeline_flags(group: Any, automatic: bool = False) -> None:
    """Add flags of mini-batches, and of transfers to R-workers. ``automatic``: allow "auto" mini-batches."""
    group.add_argument(
        "--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="dtype of the KV cache (auto: the model's)"
    )
    group.add_argument(
        "--mamba-ssm-cache-dtype", default="auto", choices=DTYPES,
        help="dtype of recurrent layers' states (auto: float32)",
    )  # fmt: skip
    group.add_argument(
        "--state-on", default="auto", choices=("s", "r", "auto"),
        help="side that keeps recurrent states (auto: the faster one by plan; elsewhere r)",
    )  # fmt: skip
    group.add_argument(
        "--state-memory", metavar="BYTES", help="S-worker's memory for states (what the weights leave of a GPU's)"
    )
    group.add_argument(
        "--num-mini-batches", type=auto_int if automatic else int, default=2 if automatic else None, metavar="K",
        help="mini-batches that take turns (" + ("2); auto: 2 or 3, whichever takes less time" if automatic else
        "2, or 1 or 3 where these give more within the limits)"),
    )  # fmt: skip
    group.add_argument(
        "--exposed-transport", action="store_true", help="both sides wait for transfers (off with a profile or numbers)"
    )
    group.add_argument(
        "--overlapped-transport", action="store_true",
        help="transfers overlap with work (off: both sides of named machines wait, as in the paper)",
    )  # fmt: skip
