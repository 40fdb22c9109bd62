"""Peak memory of loading a model over its weights: python benchmarks/load_memory.py

Saves a model with random weights, or takes ``--model``, and loads it as an engine does in a fresh process. Counted is
what is resident, mapped files included, beyond what the process held before.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from models import llama_folder


def save_random(folder: Path, hidden: int, layers: int, dtype: str) -> None:
    """A Llama of random weights as safetensors, made in a process of its own."""
    code = (
        "import sys, torch, transformers as t; folder, config, dtype = sys.argv[1:]\n"
        "c = t.AutoConfig.from_pretrained(config)\n"
        "t.AutoModelForCausalLM.from_config(c, dtype=getattr(torch, dtype)).save_pretrained(folder)"
    )
    config = llama_folder(hidden, layers, vocab=32000)
    subprocess.run([sys.executable, "-c", code, str(folder), config, dtype], check=True, stderr=subprocess.DEVNULL)


def status_mib(key: str) -> float:
    """A figure of /proc/self/status in MiB."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found.group(1)) / 1024 if found else float("nan")


def load(folder: str) -> None:
    """Load in this process and print one line."""
    from fastdecode.config import EngineConfig
    from fastdecode.sworker import SModel

    config = EngineConfig(model=folder, skip_tokenizer_init=True, device="cpu")
    before = status_mib("VmRSS")
    model = SModel(config).model
    weights = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()) / 2**20
    peak, after = status_mib("VmHWM") - before, status_mib("VmRSS") - before
    print(
        f"weights {weights:.0f} MiB, peak {peak:.0f} ({peak / weights:.3f}), loaded {after:.0f} ({after / weights:.3f})"
    )


def main() -> None:
    """Print the weights, the peak while loading and what remains."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="a folder with safetensors (else random weights are saved in one)")
    parser.add_argument("--hidden", type=int, default=2048, help="(2048)")
    parser.add_argument("--layers", type=int, default=16, help="(16)")
    parser.add_argument("--dtype", default="bfloat16", help="(bfloat16)")
    parser.add_argument("--load", action="store_true", help="load --model in this very process")
    args = parser.parse_args()
    if args.load:
        load(args.model)
        return
    with tempfile.TemporaryDirectory() as folder:
        if not args.model:
            save_random(Path(folder), args.hidden, args.layers, args.dtype)
        subprocess.run([sys.executable, __file__, "--load", "--model", args.model or folder], check=True)


if __name__ == "__main__":
    main()
