"""``fastdecode plan --emit kubernetes``: the manifests of examples/kubernetes, filled in from a plan."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TEMPLATE = Path(__file__).with_name("kubernetes.yaml")
"""A link to examples/kubernetes/base/fastdecode.yaml."""


@dataclass(frozen=True)
class PodPlan:
    """Resources and flags of the pods that a plan needs.

    ``s_flags``: words of the S-worker's command line. ``model``: the name of the model's folder in the volume, "" for
    the demo model. ``num_gpus``: GPUs of the S-worker. ``r_cores``, ``kv_cache_bytes``: of each R-worker;
    None keeps the template's values.
    """

    num_r_workers: int
    s_flags: Sequence[str]
    model: str = ""
    num_gpus: int = 0
    r_cores: int | None = None
    kv_cache_bytes: int | None = None


def kubernetes_manifests(plan: PodPlan) -> str:
    """Return all manifests as YAML, preceded by comments about what to do before applying them."""
    manifests = re.sub(r"\A(#.*\n)+", "", TEMPLATE.read_text()).split("\n---\n")
    for kind, fill in (("Deployment", _s_worker), ("StatefulSet", _r_worker)):
        (at,) = (index for index, each in enumerate(manifests) if f"\nkind: {kind}\n" in each)
        manifests[at] = fill(manifests[at], plan)
    return "\n".join(f"# {line}" for line in _header(plan)) + "\n" + "\n---\n".join(manifests).rstrip()


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


def _s_worker(manifest: str, plan: PodPlan) -> str:
    # The path at which pods mount the volume with models
    models = "/models"
    model = [f"--model={models}/{plan.model}"] if plan.model else []
    # Words that YAML accepts without quotes
    plain = re.compile(r"[\w./:=,-]+")
    words = [word if plain.fullmatch(word) else json.dumps(word) for word in (*model, *plan.s_flags)]
    manifest = _filled(manifest, r"(?<=--r-workers=join:)\d+", str(plan.num_r_workers))
    manifest = _after(manifest, "            - --shutdown-timeout=60", *(f"            - {word}" for word in words))
    if plan.model:
        mount = f"            - {{name: models, mountPath: {models}, readOnly: true}}"
        claim = "        - {name: models, persistentVolumeClaim: {claimName: models, readOnly: true}}"
        manifest = _after(manifest, "            - {name: tmp, mountPath: /tmp}", mount)
        manifest = _after(manifest, "      volumes:", claim)
    if plan.num_gpus:
        manifest = _filled(manifest, r"(?<=- name: s-worker\n          image: fastdecode:)\S+(?=\n)", r"\g<0>-cuda")
        manifest = _filled(manifest, r"(?<=memory: )\d+Gi(?=}\n)", rf"\g<0>, nvidia.com/gpu: {plan.num_gpus}", 2)
        tolerated = "      tolerations: [{key: nvidia.com/gpu, operator: Exists, effect: NoSchedule}]"
        manifest = _after(manifest, "      enableServiceLinks: false", tolerated)
    return manifest


def _r_worker(manifest: str, plan: PodPlan) -> str:
    manifest = _filled(manifest, r"(?<=\n  replicas: )\d+", str(plan.num_r_workers))
    if plan.r_cores is not None:
        manifest = _filled(manifest, r'"\d+"(?=, memory: \d+Gi})', f'"{max(1, plan.r_cores - 1)}"', 2)
    # Memory of an R-worker's pod in addition to its KV cache
    own_bytes = 1 << 30
    if plan.kv_cache_bytes is not None:
        memory = math.ceil((plan.kv_cache_bytes + own_bytes) / 2**30)
        manifest = _filled(manifest, r"(?<=memory: )\d+Gi(?=}\n)", f"{memory}Gi", 2)
        manifest = _filled(manifest, r"(?<=--kv-cache-memory=)\S+", str(plan.kv_cache_bytes))
    return manifest


def _after(manifest: str, line: str, *more: str) -> str:
    """Return YAML ``manifest`` with the lines ``more`` inserted after ``line``, which must occur once."""
    return _filled(manifest, re.escape(line) + r"(?=\n|$)", "\n".join((line, *more)).replace("\\", r"\\"))


def _filled(manifest: str, pattern: str, text: str, times: int = 1) -> str:
    """Return ``manifest`` with regex ``pattern`` replaced by ``text``. Raise RuntimeError unless ``times`` match."""
    filled, count = re.subn(pattern, text, manifest)
    if count != times:
        raise RuntimeError(f"{TEMPLATE}: {pattern!r} occurs {count} times, not {times}")
    return filled
