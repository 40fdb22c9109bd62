"""Decode throughput beside vLLM's CPU build, each at its best setting: python benchmarks/beside_vllm.py

Both run in turns (A B A B), each time in a fresh process, and medians are compared. The peers' environments come from
`make_peers.sh`. bfloat16 is compared with bfloat16; int8 weights and int8 cache with the peer's W8A8 of the same shape,
whose checkpoint is written here. Decoding starts once every sequence has its first token.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from models import llama_folder

PEERS = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastdecode" / "peers"

OURS = """
import json, sys, time
from fastdecode import SamplingParams
from fastdecode.api.from_vllm import EngineArgs
from fastdecode.engine.engine import LLMEngine
"""
THEIRS = """
import json, sys, time
from vllm import LLM, SamplingParams
EngineArgs = dict
LLMEngine = lambda settings: LLM(**settings).llm_engine
"""
RUN = """
folder, rows, prompt, output, settings = sys.argv[1], *map(int, sys.argv[2:5]), json.loads(sys.argv[5])
engine = LLMEngine(EngineArgs(model=folder, skip_tokenizer_init=True, max_num_seqs=rows, max_num_batched_tokens=4096,
                              max_model_len=prompt + output + 16, enable_prefix_caching=False, **settings))
params = SamplingParams(temperature=0, max_tokens=output, min_tokens=output, ignore_eos=True, detokenize=False)

def decode(count):
    for index in range(count):
        ids = [3 + (index * 7919 + place * 104729) % 4000 for place in range(prompt)]
        engine.add_request(f"{count}-{index}", {"prompt_token_ids": ids}, params)
    made, start, before = {}, None, 0
    while engine.has_unfinished_requests():
        for each in engine.step():
            made[each.request_id] = len(each.outputs[0].token_ids)
        if start is None and len(made) == count:
            start, before = time.perf_counter(), sum(made.values())
    return (sum(made.values()) - before) / (time.perf_counter() - start)

decode(2)
print("RESULT", decode(rows))
"""


def tokens_per_second(python: str, script: str, folder: str, shape: list[int], settings: dict[str, object]) -> float:
    """Run one measurement in a process of its own."""
    words = [python, "-c", script + RUN, folder, *map(str, shape), json.dumps(settings)]
    environment = os.environ | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "HF_HUB_OFFLINE": "1"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "6"}
    done = subprocess.run(words, capture_output=True, text=True, env=environment, check=False)
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return float(line.split()[1])
    raise SystemExit(f"{python} gave no result:\n{done.stderr[-2000:]}")


def w8a8_folder(plain: str, root: Path) -> str:
    """Write the model as compressed-tensors publishes W8A8: int8 weights with a scale per output, dynamic rows."""
    from safetensors.torch import load_file, save_file

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(Path(plain).glob("*.safetensors")):
        tensors |= load_file(file)
    packed: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not name.endswith("_proj.weight"):
            packed[name] = tensor
            continue
        scales = tensor.float().abs().amax(1, keepdim=True) / 127
        packed[name] = (tensor.float() / scales).round().clamp(-127, 127).to(torch.int8)
        packed[f"{name}_scale"] = scales.to(torch.bfloat16)
    each = {"num_bits": 8, "type": "int", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": each | {"strategy": "channel", "dynamic": False},
        "input_activations": each | {"strategy": "token", "dynamic": True},
    }
    settings = {"quant_method": "compressed-tensors", "format": "int-quantized", "quantization_status": "compressed"}
    config = json.loads((Path(plain) / "config.json").read_text())
    config["quantization_config"] = settings | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    root.mkdir(parents=True, exist_ok=True)
    save_file(packed, root / "model.safetensors", {"format": "pt"})
    (root / "config.json").write_text(json.dumps(config))
    return str(root)


def compare(plain: str, w8a8: str, shape: list[int], peer: str, rounds: int) -> None:
    """Print medians and ratios of one shape: rows, prompt tokens, output tokens."""
    theirs = str(PEERS / peer / "bin" / "python")
    ways = {
        "ours bfloat16": (sys.executable, OURS, plain, {"dtype": "bfloat16"}),
        f"{peer} bfloat16": (theirs, THEIRS, plain, {"dtype": "bfloat16"}),
        "ours int8": (sys.executable, OURS, plain, {"quantization": "int8", "kv_cache_dtype": "int8"}),
        f"{peer} W8A8": (theirs, THEIRS, w8a8, {"dtype": "bfloat16"}),
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            found[name].append(tokens_per_second(way[0], way[1], way[2], shape, way[3]))
    medians = {name: statistics.median(each) for name, each in found.items()}
    for name, each in found.items():
        print(f"{shape} {name}: {medians[name]:.0f} tokens/s ({min(each):.0f} to {max(each):.0f})", flush=True)
    names = list(ways)
    for ours, other in ((names[0], names[1]), (names[2], names[3]), (names[2], names[0])):
        print(f"{shape} {ours} over {other}: {medians[ours] / medians[other]:.2f}", flush=True)


def main() -> None:
    """Compare with one peer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peer", default="vllm", choices=["vllm", "zen"], help="(vllm)")
    parser.add_argument("--model", metavar="FOLDER", help="bfloat16 safetensors (random weights)")
    parser.add_argument("--hidden", type=int, default=1024, help="of random weights (1024)")
    parser.add_argument("--layers", type=int, default=8, help="of random weights (8)")
    parser.add_argument("--rows", type=int, default=64, help="(64)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256], help="prompt tokens (256)")
    parser.add_argument("--output", type=int, default=32, help="tokens of each sequence (32)")
    parser.add_argument("--rounds", type=int, default=3, help="(3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        plain = args.model or saved(args.hidden, args.layers, Path(scratch) / "plain")
        w8a8 = w8a8_folder(plain, Path(scratch) / "w8a8")
        for context in args.contexts:
            compare(plain, w8a8, [args.rows, context, args.output], args.peer, args.rounds)


def saved(hidden: int, layers: int, folder: Path) -> str:
    """A Llama of random weights in bfloat16, as a checkpoint."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(llama_folder(hidden, layers))
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).to(torch.bfloat16).save_pretrained(folder)
    return str(folder)


if __name__ == "__main__":
    main()
