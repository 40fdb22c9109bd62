"""What docker, GitHub and Helm read, under their own linters and schemas: `make lint-deployment`.

hadolint and check-jsonschema come from package indexes; actionlint and helm are used where the PATH has them. Manifests
that the chart makes are held against the API's schemas. Exit 1 if anything is found.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = ROOT / "examples" / "helm" / "fastdecode"
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSIONS = ("1.29", "1.37")
VALUES = (
    "",
    "sWorker.gpus=1,sWorker.modelClaim=models,sWorker.model=llama,sWorker.flags={--max-model-len=8192}",
    "rWorkers.image=fastdecode-r-worker:0.1.0,rWorkers.count=8,rWorkers.flags={--threads=3}",
)


def linted(program: str, *words: str | Path) -> bool:
    """Whether the program found nothing; True with a line where it is not here."""
    path = shutil.which(str(Path(sys.executable).with_name(program))) or shutil.which(program)
    if path is None:
        print(f"{program}: not found here, so not run")
        return True
    done = subprocess.run([path, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    print(f"{program}: {'nothing found' if done.returncode == 0 else done.stdout + done.stderr}")
    return done.returncode == 0


def chart_is_valid(values: str) -> bool:
    """Whether the API would take what the chart makes of ``values``; unknown fields are refused, too."""
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


def main() -> int:
    found = [
        linted("hadolint", "Dockerfile"),
        linted("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "compose.yaml"),
        linted("check-jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS),
        linted("actionlint", *WORKFLOWS),
        linted("helm", "lint", "--strict", CHART),
    ]
    if shutil.which("helm"):
        found += [chart_is_valid(values) for values in VALUES]
    return 0 if all(found) else 1


if __name__ == "__main__":
    sys.exit(main())
