"""The flags that describe a machine which need not be at hand, for ``plan`` and ``simulate``."""

from __future__ import annotations

from typing import Any

from fastdecode.cli.plan_inputs import DEFAULT_LINK
from fastdecode.config import KV_CACHE_DTYPES
from fastdecode.perfmodel.presets import CPU_HOSTS, GPUS


def add_machine_flags(group: Any) -> None:
    """Presets by name."""
    group.add_argument("--model", metavar="NAME_OR_PATH", help="such as llama-7b, a model folder or a config.json")
    group.add_argument("--gpu", metavar="NAME", help=f"of the S-worker: {', '.join(GPUS)}")
    group.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="GPUs of the S-worker (1)")
    group.add_argument("--cpu", metavar="NAME", help=f"hosts of R-workers: {', '.join(CPU_HOSTS)}")
    group.add_argument("--link", metavar="RATE", help=f"of the S-worker, such as 100Gb or 12.5GB ({DEFAULT_LINK})")
    group.add_argument(
        "--kv-cache-memory", metavar="BYTES", help="per R-worker, such as 100GiB (80%% of the host's, shared)"
    )
    group.add_argument("--r-workers-per-host", type=int, metavar="N", help="(the host's NUMA nodes)")


def add_number_flags(group: Any) -> None:
    """A profile, or bare numbers."""
    group.add_argument("--profile", metavar="FILE", help="a HardwareProfile as JSON, from any machine")
    group.add_argument("--s-part-seconds", type=float, metavar="SECONDS", help="T(B): one layer of one mini-batch")
    group.add_argument(
        "--r-part-seconds-per-token", type=float, metavar="SECONDS", help="R: of one R-worker, one layer"
    )
    group.add_argument("--num-layers", type=int, metavar="N", help="beside those two")


def add_pipeline_flags(group: Any) -> None:
    """How S-worker and R-workers work together."""
    group.add_argument("--kv-cache-dtype", default="auto", choices=KV_CACHE_DTYPES, help="(auto: the model's)")
    group.add_argument("--num-mini-batches", type=int, default=2, metavar="K", help="that take turns (2)")
    group.add_argument("--exposed-transport", action="store_true", help="nobody computes during transfers (off)")
