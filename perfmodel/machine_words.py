"""Parses machines given as numbers: a GPU or an R-worker host by bandwidth, speed or cores, and memory."""

from __future__ import annotations

import re

from fastdecode.core.errors import ConfigError
from fastdecode.perfmodel.hardware import (
    CPU_READ_EFFICIENCY,
    FLOPS_EFFICIENCY,
    GPU_READ_EFFICIENCY,
    CpuHost,
    Figure,
    Gpu,
)
from fastdecode.perfmodel.presets import NUMBERS, find_cpu_host, find_gpu

GIVEN = "as given"

_PART = re.compile(
    r"(?P<pcie>pcie)?(?P<number>\d+(\.\d+)?)(?P<unit>gb/s|tb/s|tflops|cores?|gib|gb|tib|tb)", re.IGNORECASE
)


def gpu_of(words: str) -> Gpu:
    """Return the GPU that ``words`` mean: a preset, or figures with units. A ConfigError names the wrong part."""
    if not _is_numbers(words):
        return find_gpu(words)
    parts = _parts("gpu", words, ("rate", "flops", "memory"), optional=("pcie",))
    read = Figure(parts["rate"], GPU_READ_EFFICIENCY, False, f"{GIVEN}; 0.8 taken for any GPU")
    flops = Figure(parts["flops"], FLOPS_EFFICIENCY, False, f"{GIVEN}; as the FastDecode paper's A10")
    # Default bytes per second of PCIe 4.0 x16 in one direction
    usual_pcie = 32e9
    return Gpu("your GPU", flops, read, read, parts["memory"], parts.get("pcie", usual_pcie))


def cpu_host_of(words: str) -> CpuHost:
    """Return the R-worker host that ``words`` mean: a preset, or figures of a host that also has the GPU."""
    if not _is_numbers(words):
        return find_cpu_host(words)
    parts = _parts("cpu", words, ("rate", "cores", "memory"))
    if parts["cores"] != int(parts["cores"]) or parts["cores"] < 1:
        raise ConfigError(f"cpu: {parts['cores']:g} cores must be a whole number of at least 1, as in {NUMBERS['cpu']}")
    reading = Figure(parts["rate"], CPU_READ_EFFICIENCY, False, f"{GIVEN}; as the FastDecode paper's Epyc 7452")
    return CpuHost("your host", 1, int(parts["cores"]), reading, parts["memory"], holds_gpu=True)


def _is_numbers(words: str) -> bool:
    return ":" in words or bool(_PART.fullmatch(words.strip().replace(" ", "")))


def _parts(flag: str, words: str, needed: tuple[str, ...], optional: tuple[str, ...] = ()) -> dict[str, float]:
    """Return the figures in ``words`` by name ("rate", …), in bytes, FLOP and seconds. ``flag``: named in errors."""
    found: dict[str, float] = {}
    units = {
        "gb/s": ("rate", 1e9),
        "tb/s": ("rate", 1e12),
        "tflops": ("flops", 1e12),
        "cores": ("cores", 1.0),
        "core": ("cores", 1.0),
        "gib": ("memory", 2.0**30),
        "tib": ("memory", 2.0**40),
        "gb": ("memory", 1e9),
        "tb": ("memory", 1e12),
    }
    # Figures beyond which the unit must be wrong
    most = {"rate": 1e15, "flops": 1e18, "cores": 4096.0, "memory": 1e15, "pcie": 1e15}
    for word in words.replace(" ", "").split(":"):
        match = _PART.fullmatch(word)
        kind, factor = units[match["unit"].lower()] if match else ("", 0.0)
        if match and match["pcie"]:
            kind = "pcie" if kind == "rate" else ""
        if match is None or kind not in (*needed, *optional) or kind in found:
            again = " twice" if kind in found else ""
            raise ConfigError(f"{flag}: {word!r} is not understood{again}; numbers look like {NUMBERS[flag]}")
        found[kind] = float(match["number"]) * factor
        if not 0 < found[kind] <= most[kind]:
            raise ConfigError(f"{flag}: {word!r} is no figure of a machine; numbers look like {NUMBERS[flag]}")
    if lacking := [kind for kind in needed if kind not in found]:
        names = " and ".join(NAMES[kind] for kind in lacking)
        raise ConfigError(f"{flag}: {words!r} does not say its {names}; numbers look like {NUMBERS[flag]}")
    return found


NAMES = {"rate": "memory bandwidth", "flops": "TFLOPS", "cores": "cores", "memory": "memory"}
