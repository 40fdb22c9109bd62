"""Profiles as JSON: every key known, none missing, every number finite."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar

from fastdecode.core.errors import ConfigError, ProfileError
from fastdecode.perfmodel.index_shape import IndexShape
from fastdecode.perfmodel.latent_shape import LatentShape
from fastdecode.perfmodel.measurements import (
    AnchorPoint,
    ContentionPoint,
    HostPoint,
    LinkPoint,
    MachineIdentity,
    PlanPoint,
    PrefillPoint,
    RPartPoint,
    SPartPoint,
)
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.partition import PartitionEntry, PartitionTable
from fastdecode.perfmodel.profile import FORMAT_VERSION, HardwareProfile
from fastdecode.perfmodel.state_shape import StateShape


def write_profile(profile: HardwareProfile) -> str:
    """Return the profile as JSON for :func:`read_profile`."""
    return json.dumps(asdict(profile), indent=2) + "\n"


def read_profile(text: str) -> HardwareProfile:
    """Return the profile in ``text``. A ProfileError names what is missing, unknown or of the wrong type."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"the profile is not valid JSON: {error}") from None
    read_versions = (1, 2, FORMAT_VERSION)
    if isinstance(data, dict) and data.get("format_version") not in read_versions:
        known = f"{', '.join(map(str, read_versions[:-1]))} and {read_versions[-1]}"
        raise ProfileError(
            f"the profile's format_version is {data.get('format_version')!r}, and this version reads {known}"
        )
    parts = {"machine": MachineIdentity, "shape": ModelShape}
    lists = {
        "s_part": SPartPoint,
        "r_part": RPartPoint,
        "links": LinkPoint,
        "host": HostPoint,
        "plans": PlanPoint,
        "contention": ContentionPoint,
        "anchors": AnchorPoint,
        "prefill": PrefillPoint,
        "partitions": PartitionEntry,
    }
    try:
        found = dict(_object(data, "profile")) | {"format_version": FORMAT_VERSION}
        found |= {key: _build(kind, found.get(key), key) for key, kind in parts.items()}
        found |= {key: _build_all(kind, found.get(key, []), key) for key, kind in lists.items()}
        profile = _build(HardwareProfile, found, "profile")
        profile.measured_s_part()
        PartitionTable(profile.partitions)
    except ConfigError as error:
        raise ProfileError(f"the profile cannot be right: {error}") from None
    return profile


def load_profile(path: str) -> HardwareProfile:
    """Return the profile in the file ``path``. Raise ProfileError for bad content, OSError for a failed read."""
    try:
        return read_profile(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise ProfileError(f"{path}: not a text file: {error}") from None


_Part = TypeVar("_Part")


def _build(kind: type[_Part], value: Any, where: str) -> _Part:
    """Return a frozen dataclass from a JSON object with the right keys and finite numbers that are not negative."""
    data = _object(value, where)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    missing = [name for name, field in known.items() if field.default is MISSING and name not in data]
    unknown = sorted(set(data) - set(known))
    if missing or unknown:
        raise ProfileError(f"{where}: " + (f"lacks {missing[0]}" if missing else f"unknown key {unknown[0]}"))
    for name, item in data.items():
        _check(f"{where}.{name}", item, str(known[name].type))
    plain = {name: _plain(item, str(known[name].type), f"{where}.{name}") for name, item in data.items()}
    try:
        return kind(**plain)
    except ConfigError as error:
        raise ProfileError(f"{where} cannot be right: {error}") from None


def _plain(item: Any, kind: str, where: str) -> Any:
    """Return a field's value: a dataclass for a JSON object of a model's sizes, a tuple for a list."""
    # Fields of a model's shape that are dataclasses themselves, by annotation
    of_shapes = {"LatentShape | None": LatentShape, "IndexShape | None": IndexShape, "StateShape | None": StateShape}
    if kind in of_shapes and item is not None:
        return _build(of_shapes[kind], item, where)
    return tuple(item) if isinstance(item, list) else item


def _build_all(kind: type[_Part], values: Any, where: str) -> tuple[_Part, ...]:
    if not isinstance(values, list):
        raise ProfileError(f"{where} must be a list")
    return tuple(_build(kind, value, f"{where}[{index}]") for index, value in enumerate(values))


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} must be a JSON object")
    return value


def _check(where: str, value: Any, kind: str) -> None:
    if kind == "Parts":
        if not isinstance(value, list):
            raise ProfileError(f"{where} must be a list of whole numbers, not {value!r}")
        for index, item in enumerate(value):
            _check(f"{where}[{index}]", item, "int")
        return
    accepted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    if kind not in accepted:
        return
    if not isinstance(value, accepted[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ProfileError(f"{where} must be of type {kind}, not {value!r}")
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ProfileError(f"{where} must be a finite number of at least 0, not {value!r}")
