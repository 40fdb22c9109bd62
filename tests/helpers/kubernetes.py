"""Reads the manifests of examples/kubernetes for tests."""

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
    """Return all documents of a file."""
    return [each for each in yaml.safe_load_all(path.read_text()) if each]


def base() -> Manifests:
    """Return the manifests without overlays."""
    return read(FOLDER / "base" / "fastdecode.yaml")


def find(manifests: Manifests, kind: str, name: str) -> Manifest:
    """Return the manifest with this kind and name."""
    (found,) = (each for each in manifests if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


def pods(manifests: Manifests) -> dict[str, Manifest]:
    """Return the pod templates by component."""
    templates = [each["spec"]["template"] for each in manifests if each["kind"] in ("Deployment", "StatefulSet")]
    return {each["metadata"]["labels"]["app.kubernetes.io/component"]: each for each in templates}


def container(manifests: Manifests, component: str) -> Manifest:
    """Return the container that runs fastdecode."""
    (found,) = pods(manifests)[component]["spec"]["containers"]
    return found


def parsed(manifests: Manifests, component: str) -> argparse.Namespace:
    """Return the container's command line as the program parses it."""
    return build_parser().parse_args(container(manifests, component)["args"])


def port_of(component: Manifest, named: str) -> int:
    """Return the number of a container's named port."""
    (found,) = (each["containerPort"] for each in component["ports"] if each["name"] == named)
    return int(found)


def selected(manifests: Manifests, labels: dict[str, str]) -> Iterator[Manifest]:
    """Yield the pod templates that the selector ``labels`` matches."""
    for template in pods(manifests).values():
        if labels.items() <= template["metadata"]["labels"].items():
            yield template
