"""Whose figures a profile holds, and whether they are this machine's and this model's."""

from __future__ import annotations

import os
import socket
from dataclasses import fields

from fastdecode import __version__
from fastdecode.errors import ProfileError
from fastdecode.machine import cpu_name
from fastdecode.perfmodel.model_shape import ModelShape
from fastdecode.perfmodel.points import MachineIdentity
from fastdecode.perfmodel.profile import HardwareProfile


def this_machine(device_name: str, r_worker: str, isa: str) -> MachineIdentity:
    """What a profile made here and now says of its machine; ``device_name``: of the S-worker's GPU, if any."""
    cores = f"{cpu_name()}, {os.cpu_count()} cores"
    return MachineIdentity(socket.gethostname(), device_name or cores, r_worker, isa, __version__)


def check_own(profile: HardwareProfile, here: MachineIdentity) -> None:
    """ProfileError unless ``profile`` was made on this machine, by this version."""
    names = {"host": "machine", "s_worker": "S-worker", "isa": "instruction set", "fastdecode_version": "version"}
    for field, words in names.items():
        theirs, ours = getattr(profile.machine, field), getattr(here, field)
        if theirs != ours:
            raise ProfileError(
                f"the profile is of another {words}, {theirs!r}, and this is {ours!r}: run `fastdecode calibrate` here "
                f"(plan and simulate take profiles from anywhere)"
            )


def check_alike(profile: HardwareProfile, shape: ModelShape) -> None:
    """ProfileError where ``shape``'s layers are not those that ``profile`` was made with, KV heads apart."""
    sizes = [field.name for field in fields(ModelShape) if field.name not in ("name", "num_layers", "num_kv_heads")]
    unlike = next((size for size in sizes if getattr(shape, size) != getattr(profile.shape, size)), None)
    if unlike:
        raise ProfileError(
            f"the profile was measured on {profile.shape.name}, whose {unlike} is {getattr(profile.shape, unlike)}, "
            f"and {shape.name} has {getattr(shape, unlike)}"
        )
