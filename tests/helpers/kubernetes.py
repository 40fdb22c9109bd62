"""The manifests of examples/kubernetes, as tests look at them."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fastdecode.cli.main import build_parser

FOLDER = Path(__file__).parents[2] / "examples" / "kubernetes"
Manifest = dict[str, Any]
Manifests = list[Manifest]


def read(path: Path) -> Manifests:
    """All documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def base() -> Manifests:
    """What is applied without overlays."""
    return read(FOLDER / "base" / "fastdecode.yaml")


def find(manifests: Manifests, kind: str, name: str) -> Manifest:
    """The one of that kind and name."""
    (found,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(manifests: Manifests) -> dict[str, Manifest]:
    """The pod templates by their component."""
    templates = [each["spec"]["template"] for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def container(manifests: Manifests, component: str) -> Manifest:
    """The one that runs fastdecode."""
    (found,) = pods(manifests)[component]["spec"]["containers"]
    return found


def parsed(manifests: Manifests, component: str) -> argparse.Namespace:
    """Its command line, as the program reads it."""
    return build_parser().parse_args(container(manifests, component)["args"])


def port_of(component: Manifest, named: str) -> int:
    """The number of a container's port."""
    (found,) = (each["containerPort"] for each in component["ports"] if each["name"] == named)
    return int(found)


def selected(manifests: Manifests, labels: dict[str, str]) -> Iterator[Manifest]:
    """The pod templates that a selector matches."""
    for template in pods(manifests).values():
        if labels.items() <= template["metadata"]["labels"].items():
            yield template
