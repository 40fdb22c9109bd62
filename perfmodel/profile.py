"""What was measured of a machine, as JSON with units in the names: the plan's input in place of presets."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, TypeVar

from fastdecode.errors import ConfigError, ProfileError
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.r_part import RPart
from fastdecode.perfmodel.s_part import MeasuredSPart

FORMAT_VERSION = 1
"""Of the JSON; a profile of another version is refused."""


@dataclass(frozen=True)
class MachineIdentity:
    """Whose figures these are."""

    host: str
    s_worker: str
    r_worker: str
    isa: str
    fastdecode_version: str


@dataclass(frozen=True)
class SPartPoint:
    """The S-part of one layer and of the head at one batch size; spread is (largest − smallest) / median."""

    batch_size: int
    layer_seconds: float
    head_seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class RPartPoint:
    """One R-worker's attention at one shape: per cached token and layer, and once per call."""

    kv_cache_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    context_len: int
    threads: int
    seconds_per_token: float
    call_seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class LinkPoint:
    """The way to one R-worker and back: of a round trip, and per byte of q, k, v and o together."""

    r_worker: str
    bytes_per_second: float
    latency_seconds: float
    spread: float = 0.0


@dataclass(frozen=True)
class HardwareProfile:
    """A machine's S-worker, R-workers and links as calibrated for one model's layers. ProfileError where it lacks."""

    machine: MachineIdentity
    shape: ModelShape
    s_part: tuple[SPartPoint, ...]
    r_part: tuple[RPartPoint, ...]
    links: tuple[LinkPoint, ...] = ()
    step_overhead_seconds: float = 0.0
    format_version: int = FORMAT_VERSION

    def measured_s_part(self) -> MeasuredSPart:
        """T(B) of the profile's own layers."""
        points = sorted(self.s_part, key=lambda point: point.batch_size)
        return MeasuredSPart(
            tuple(point.batch_size for point in points),
            tuple(point.layer_seconds for point in points),
            tuple(point.head_seconds for point in points),
        )

    def measured_r_part(self, kv_dtype: str, context_len: float) -> RPart:
        """R of the profile's own heads in that KV dtype, at the context measured that is nearest in proportion."""
        heads = (self.shape.num_heads, self.shape.num_kv_heads, self.shape.head_dim)
        points = [
            point
            for point in self.r_part
            if point.kv_cache_dtype == kv_dtype and (point.num_heads, point.num_kv_heads, point.head_dim) == heads
        ]
        if not points:
            raise ProfileError(
                f"the profile of {self.machine.host} has no R-part for {kv_dtype} with {heads[0]} / {heads[1]} heads "
                f"of {heads[2]}; it has {', '.join(sorted({p.kv_cache_dtype for p in self.r_part})) or 'none'}"
            )
        nearest = min(points, key=lambda point: abs(math.log(point.context_len / context_len)))
        return RPart(nearest.seconds_per_token, nearest.call_seconds)

    def slowest_link(self) -> LinkPoint | None:
        """The link that a step waits for longest; None where R-workers share this process's memory."""
        return min(self.links, key=lambda link: link.bytes_per_second, default=None)

    def to_json(self) -> str:
        """As :func:`read_profile` reads it."""
        return json.dumps(asdict(self), indent=2) + "\n"


def read_profile(text: str) -> HardwareProfile:
    """The profile in ``text``; ProfileError names what is missing, unknown or of the wrong type."""
    try:
        data = json.loads(text)
    except ValueError as error:
        raise ProfileError(f"the profile is not valid JSON: {error}") from None
    if isinstance(data, dict) and data.get("format_version") != FORMAT_VERSION:
        raise ProfileError(
            f"the profile's format_version is {data.get('format_version')!r}, and this version reads {FORMAT_VERSION}"
        )
    parts = {"machine": MachineIdentity, "shape": ModelShape}
    lists = {"s_part": SPartPoint, "r_part": RPartPoint, "links": LinkPoint}
    try:
        found = dict(_object(data, "profile"))
        found |= {key: _build(kind, found.get(key), key) for key, kind in parts.items()}
        found |= {key: _build_all(kind, found.get(key, []), key) for key, kind in lists.items()}
        profile = _build(HardwareProfile, found, "profile")
        profile.measured_s_part()
    except ConfigError as error:
        raise ProfileError(f"the profile cannot be right: {error}") from None
    return profile


_Part = TypeVar("_Part")


def _build(kind: type[_Part], value: Any, where: str) -> _Part:
    """A frozen dataclass from a JSON object: every key known, none missing, numbers finite and not negative."""
    data = _object(value, where)
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    missing = [name for name, field in known.items() if field.default is MISSING and name not in data]
    unknown = sorted(set(data) - set(known))
    if missing or unknown:
        raise ProfileError(f"{where}: " + (f"lacks {missing[0]}" if missing else f"unknown key {unknown[0]}"))
    for name, item in data.items():
        _check(f"{where}.{name}", item, str(known[name].type))
    return kind(**data)


def _build_all(kind: type[_Part], values: Any, where: str) -> tuple[_Part, ...]:
    if not isinstance(values, list):
        raise ProfileError(f"{where} must be a list")
    return tuple(_build(kind, value, f"{where}[{index}]") for index, value in enumerate(values))


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise ProfileError(f"{where} must be a JSON object")
    return value


def _check(where: str, value: Any, kind: str) -> None:
    accepted: dict[str, tuple[type, ...]] = {"int": (int,), "float": (int, float), "str": (str,), "bool": (bool,)}
    if kind not in accepted:
        return
    if not isinstance(value, accepted[kind]) or (isinstance(value, bool) and kind != "bool"):
        raise ProfileError(f"{where} must be of type {kind}, not {value!r}")
    if isinstance(value, int | float) and not 0 <= value < math.inf:
        raise ProfileError(f"{where} must be a finite number of at least 0, not {value!r}")
