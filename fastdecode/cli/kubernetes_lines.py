"""What ``fastdecode plan --emit kubernetes`` prints: the manifests of examples/kubernetes, filled in."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

TEMPLATE = Path(__file__).with_name("kubernetes.yaml")
"""A link to examples/kubernetes/base/fastdecode.yaml, which is all of it but the figures."""

MODELS = "/models"
"""Where pods find models, in the claim that the header tells of."""

OWN_BYTES = 1 << 30
"""Memory of an R-worker's pod beside its KV cache."""

Manifest = dict[str, Any]


@dataclass(frozen=True)
class PodPlan:
    """What the pods of a plan need.

    ``s_flags``: words of the S-worker's command line. ``model``: its folder's name in the claim, "" for the demo model.
    ``num_gpus``: of the S-worker. ``r_cores``: of an R-worker, and ``kv_cache_bytes`` of its cache; None where the plan
    does not know, so that the template's stay.
    """

    num_r_workers: int
    s_flags: Sequence[str]
    model: str = ""
    num_gpus: int = 0
    r_cores: int | None = None
    kv_cache_bytes: int | None = None


def kubernetes_manifests(plan: PodPlan) -> str:
    """All manifests as YAML, behind what is to be done before they are applied."""
    manifests = [each for each in yaml.safe_load_all(TEMPLATE.read_text()) if each]
    _fill_s_worker(_pod(manifests, "Deployment"), plan)
    _fill_r_worker(_pod(manifests, "StatefulSet"), plan)
    _find(manifests, "StatefulSet")["spec"]["replicas"] = plan.num_r_workers
    text = yaml.safe_dump_all(manifests, sort_keys=False, width=120)
    return "\n".join(f"# {line}" for line in _header(plan)) + "\n" + text.rstrip()


def _header(plan: PodPlan) -> Iterator[str]:
    yield "kubectl create secret generic fastdecode --from-literal=pool.key=$(openssl rand -hex 32) \\"
    yield "  --from-literal=api-key=$(openssl rand -hex 32)"
    yield "Name your image in place of fastdecode:0.1.0 (and fastdecode:0.1.0-cuda); the Dockerfile builds both."
    if plan.model:
        yield f"The claim `models` (PersistentVolumeClaim) is to hold the model's folder at {plan.model}."
    if plan.r_cores is None or plan.kv_cache_bytes is None:
        yield "The plan does not say how many cores or how much memory an R-worker has: set these for your nodes."
    else:
        yield f"Of the {plan.r_cores} cores of each R-worker one is left to its node. Set the S-worker's by your own."


def _fill_s_worker(pod: Manifest, plan: PodPlan) -> None:
    container = pod["containers"][0]
    kept = [flag for flag in container["args"] if not flag.startswith("--r-workers=")]
    model = [f"--model={MODELS}/{plan.model}"] if plan.model else []
    container["args"] = [*kept, f"--r-workers=join:{plan.num_r_workers}", *model, *plan.s_flags]
    if plan.model:
        container["volumeMounts"].append({"name": "models", "mountPath": MODELS, "readOnly": True})
        pod["volumes"].append({"name": "models", "persistentVolumeClaim": {"claimName": "models", "readOnly": True}})
    if plan.num_gpus:
        container["image"] += "-cuda"
        for kind in ("requests", "limits"):
            container["resources"][kind]["nvidia.com/gpu"] = plan.num_gpus
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


def _fill_r_worker(pod: Manifest, plan: PodPlan) -> None:
    container = pod["containers"][0]
    both = [container["resources"][kind] for kind in ("requests", "limits")]
    if plan.r_cores is not None:
        for each in both:
            each["cpu"] = str(max(1, plan.r_cores - 1))
    if plan.kv_cache_bytes is not None:
        kept = [flag for flag in container["args"] if not flag.startswith("--kv-cache-memory=")]
        container["args"] = [*kept, f"--kv-cache-memory={plan.kv_cache_bytes}"]
        for each in both:
            each["memory"] = f"{math.ceil((plan.kv_cache_bytes + OWN_BYTES) / 2**30)}Gi"


def _pod(manifests: Sequence[Manifest], kind: str) -> Manifest:
    found: Manifest = _find(manifests, kind)["spec"]["template"]["spec"]
    return found


def _find(manifests: Sequence[Manifest], kind: str) -> Manifest:
    (found,) = (each for each in manifests if each["kind"] == kind)
    return found
