"""The memory of a process stays as it is."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

PRODUCTS = """
import re
from pathlib import Path
import fastdecode.sworker
import torch
from fastdecode.sworker.prepack import PackedLinears

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
"""Megabytes that products of 220 new numbers of rows add to those of 64.

Not by ``getrusage``, whose peak a process inherits from the one that starts it.
"""


def growth(**environment: str) -> int:
    command = [sys.executable, "-c", PRODUCTS]
    ran = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True, timeout=120)
    assert ran.returncode == 0
    return int(ran.stdout)


def test_products_of_ever_new_numbers_of_rows_take_no_more_memory() -> None:
    assert growth() < 60


def test_what_the_user_set_stays() -> None:
    """And the memory of products does grow where torch keeps them all: otherwise the other test says nothing."""
    assert growth(LRU_CACHE_CAPACITY="1024", ONEDNN_PRIMITIVE_CACHE_CAPACITY="1024") > 120
