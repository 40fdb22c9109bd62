"""The memory of a process does not grow."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest
from helpers.processes import PATIENCE_SECONDS

pytestmark = pytest.mark.slow

PRODUCTS = """
import re
from pathlib import Path
import fastdecode.sworker
import torch
from fastdecode.sworker.model.prepack import PackedLinears

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Linear(512, 256))
packed = PackedLinears(model)
assert packed.num_layers == 2

def peak(first, last):
    with torch.inference_mode():
        for rows in range(first, last):
            model(torch.zeros(1, rows, 256))
    return int(re.search("VmHWM: *([0-9]+)", Path("/proc/self/status").read_text().expandtabs(1))[1]) // 1024

before = peak(16, 80)
print(peak(80, 300) - before)
"""
"""Code that prints the megabytes that products of 220 new numbers of rows add to those of 64.
It does not use ``getrusage``, whose peak a process inherits from its parent.
"""


def growth(**environment: str) -> int:
    command = [sys.executable, "-c", PRODUCTS]
    ran = subprocess.run(
        command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=PATIENCE_SECONDS
    )
    assert ran.returncode == 0
    return int(ran.stdout)


@pytest.mark.thorough
def test_products_of_ever_new_numbers_of_rows_take_no_more_memory() -> None:
    assert growth() < 60


@pytest.mark.thorough  # This test shows that the one before can fail.
def test_what_the_user_set_stays() -> None:
    """The memory of products does grow where torch keeps them all; otherwise the other test would prove nothing."""
    assert growth(LRU_CACHE_CAPACITY="1024", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024") > 120


FREED = """
import ctypes
import psutil
from fastdecode.core.machine import return_free_memory

libc, process = ctypes.CDLL(None), psutil.Process()
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
blocks = [libc.malloc(4000) for _ in range(20_000)]  # of 80 MB, above which the last one stays
for block in blocks:
    ctypes.memset(block, 1, 4000)
for block in blocks[:-1]:
    libc.free(block)
before = process.memory_info().rss
return_free_memory()
print((before - process.memory_info().rss) >> 20)
"""


def test_what_was_freed_goes_back_to_the_system() -> None:
    """glibc keeps megabytes below a block that is still in use."""
    if platform.libc_ver()[0] != "glibc":
        pytest.skip("another C library")
    run = subprocess.run([sys.executable, "-c", FREED], capture_output=True, text=True, check=True)
    assert int(run.stdout) > 60
