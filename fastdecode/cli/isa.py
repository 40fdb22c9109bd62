"""The instruction set that R-workers of this machine will use."""

from __future__ import annotations

import os

from fastdecode.errors import ConfigError


def chosen_isa() -> str:
    """The best one supported, or that of ``FASTDECODE_ISA``; ConfigError where this machine has it not."""
    from fastdecode import _rworker

    supported = tuple(_rworker.supported_isas())
    forced = os.environ.get("FASTDECODE_ISA") or "auto"
    if forced not in ("auto", *supported):
        raise ConfigError(f"FASTDECODE_ISA must be one of {', '.join(supported)}, not {forced!r}")
    return supported[-1] if forced == "auto" else forced
