"""One rank of a model in int8; prints hashes of the logits of 1 and of 64 rows, with 1 thread and with 2.

``python integer_logits.py INDEX SIZE PORT FOLDER…``: rank 0 prints two lines per folder, "dtype hash hash…". Attention
calls are answered with the values, so no R-worker takes part.
"""

from __future__ import annotations

import hashlib
import sys

import torch

from fastdecode.api.config import EngineConfig
from fastdecode.sworker import SModel
from fastdecode.sworker.model.recorder import Recorder
from fastdecode.sworker.model.sharding import Rendezvous, leave
from fastdecode.sworker.model.support import _forward
from fastdecode.sworker.run.pipeline import ModelGreenlet

TOKENS = [(7 + 31 * place) % 500 for place in range(64)]


def digests(model: SModel) -> list[str]:
    """Return hashes of the first row's logits, alone and among 64, and of all 64, by number of threads."""
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        one, many = (
            _forward(model.code, model._hf_config, ModelGreenlet, Recorder(model._hf_config).answer, TOKENS[:count],
                     range(count)).float()
            for count in (1, 64)
        )  # fmt: skip
        found += [hashlib.sha256(each.numpy().tobytes()).hexdigest() for each in (one, many[:1], many)]
    return found


def main(index: int, size: int, port: int, folders: list[str]) -> None:
    rank = Rendezvous(index, size, "127.0.0.1", port, index == 0).join("cpu", index) if size > 1 else None
    for folder in folders:
        for dtype in ("float32", "bfloat16"):
            given = {"quantization": "int8", "device": "cpu", "skip_tokenizer_init": True, "dtype": dtype}
            model = SModel(EngineConfig(folder, **given), rank)
            found = digests(model)
            if index == 0:
                print(dtype, *found, flush=True)
    leave(rank)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]), sys.argv[4:])
