"""Train the demo model: a byte-level Llama on the source of Python's standard library, in 20 minutes on two cores.

Run it with ``python scripts/train_demo_model.py``; run it again to resume after an interruption. Checkpoints live in
``--work``; the finished model goes to ``--out`` as a folder that ``transformers`` loads, with held-out text beside it.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path

import numpy as np
import torch
from demo_model_folder import BOS, EOS, PAD, VOCAB, export, heldout_bits, loss_of, stdlib_split, write_readme
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

CHUNK = 1024
"""Tokens of text that are shuffled together; windows of every training length divide it."""
PHASES = ((0.0, 256), (0.5, 512), (0.85, 1024))
"""Share of the run from which windows have a number of tokens."""


class Windows:
    """Batches of windows over the shuffled corpus. Each batch depends only on the step, so that a run can resume."""

    def __init__(self, texts: list[str], tokens_per_step: int, seed: int) -> None:
        order = np.random.default_rng(seed).permutation(len(texts))
        parts = [np.r_[np.frombuffer(texts[i].encode(), np.uint8).astype(np.int64), EOS, BOS] for i in order]
        self.stream = np.concatenate(parts)
        after_newline = np.flatnonzero(self.stream[:-1] == ord("\n")) + 1
        first = self.stream[after_newline]
        self.lines = np.r_[0, after_newline]
        self.tops = np.r_[0, after_newline[(first > ord(" ")) & (first < 128)]]
        self.per_step, self.seed = tokens_per_step // CHUNK, seed
        self.chunks = len(self.stream) // CHUNK - 1

    def starts(self, offsets: np.ndarray, length: int) -> np.ndarray:
        """Move offsets back to the start of a top-level statement, or of a line if no statement is near."""
        line = self.lines[np.searchsorted(self.lines, offsets, "right") - 1]
        top = self.tops[np.searchsorted(self.tops, offsets, "right") - 1]
        near = np.where(offsets - top < length // 4, top, line)
        return np.where(offsets - near < length // 4, near, offsets)

    def batch(self, step: int, length: int) -> torch.Tensor:
        """Return token ids [windows, length + 1]; every window begins with the bos token."""
        ids = np.arange(step * self.per_step, (step + 1) * self.per_step)
        chunk = np.empty_like(ids)
        for epoch in np.unique(ids // self.chunks):
            rng = np.random.default_rng((self.seed, int(epoch)))
            jitter, order = int(rng.integers(CHUNK)), rng.permutation(self.chunks)
            here = ids // self.chunks == epoch
            chunk[here] = order[ids[here] % self.chunks] * CHUNK + jitter
        offsets = (chunk[:, None] + np.arange(0, CHUNK, length)).ravel()
        rows = self.stream[self.starts(offsets, length)[:, None] + np.arange(length)]
        return torch.from_numpy(np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1))


def orthogonalized(update: torch.Tensor) -> torch.Tensor:
    """Return a batch of matrices with singular values near 1, by Muon's Newton-Schulz iteration."""
    x = update / (update.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        square = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(square, square, square, beta=-4.7750, alpha=2.0315) @ x
    return x


class Optimizer:
    """Muon for the layers' matrices and Adam for all other parameters.
    One flat dictionary of tensors holds the state.
    """

    def __init__(self, model: torch.nn.Module, muon_rate: float, adam_rate: float) -> None:
        named = dict(model.named_parameters())
        self.matrices = {n: p for n, p in named.items() if p.ndim == 2 and "layers" in n}
        self.others = {n: p for n, p in named.items() if n not in self.matrices}
        self.muon_rate, self.adam_rate = muon_rate, adam_rate
        self.state = {f"momentum.{n}": torch.zeros_like(p) for n, p in self.matrices.items()}
        self.state |= {f"{key}.{n}": torch.zeros_like(p) for key in ("mean", "square") for n, p in self.others.items()}

    @torch.no_grad()
    def step(self, count: int, scale: float) -> None:
        """Do the update with number ``count`` (from 1), with learning rates times ``scale``; clear the gradients."""
        groups: dict[tuple[int, ...], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for name, p in self.matrices.items():
            assert p.grad is not None
            momentum = self.state[f"momentum.{name}"].lerp_(p.grad, 0.05)
            update, target = p.grad.lerp(momentum, 0.95), p.data
            if p.shape[0] > p.shape[1]:
                update, target = update.mT, target.mT
            groups.setdefault(tuple(update.shape), []).append((update, target))
            p.mul_(1 - 0.1 * self.muon_rate * scale)
        for members in groups.values():
            for update, (_, target) in zip(orthogonalized(torch.stack([u for u, _ in members])), members, strict=True):
                target.sub_(update, alpha=self.muon_rate * scale)
        for name, p in self.others.items():
            assert p.grad is not None
            mean, square = self.state[f"mean.{name}"].lerp_(p.grad, 0.1), self.state[f"square.{name}"]
            square.lerp_(p.grad.square(), 0.02)
            root = (square / (1 - 0.98**count)).sqrt_().add_(1e-10)
            p.addcdiv_(mean, root, value=-self.adam_rate * scale / (1 - 0.9**count))
        for p in (*self.matrices.values(), *self.others.values()):
            p.grad = None


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """Return a new model of the demo's shape, in float32; output projections start at zero."""
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=args.hidden, intermediate_size=args.intermediate, num_hidden_layers=args.layers,
        num_attention_heads=8, num_key_value_heads=2, head_dim=32, max_position_embeddings=2048,
        tie_word_embeddings=False, bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for name, p in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "lm_head.weight")):
            torch.nn.init.zeros_(p)
    return model


def save_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: Optimizer, progress: dict[str, float]) -> None:
    """Write weights, optimizer state and progress as one safetensors file, and rename it into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {f"model.{n}": p.detach() for n, p in model.named_parameters()}
    tensors |= {f"optimizer.{n}": t for n, t in optimizer.state.items()}
    save_file(tensors, path.with_suffix(".tmp"), {"progress": json.dumps(progress)})
    path.with_suffix(".tmp").replace(path)


def load_checkpoint(path: Path, model: LlamaForCausalLM, optimizer: Optimizer) -> dict[str, float]:
    """Load what ``save_checkpoint`` wrote, if the file exists; return the steps and seconds of training done."""
    if not path.exists():
        return {"step": 0, "seconds": 0.0}
    tensors = load_file(path)
    model.load_state_dict({n[6:]: t for n, t in tensors.items() if n.startswith("model.")})
    optimizer.state = {n[10:]: t for n, t in tensors.items() if n.startswith("optimizer.")}
    with safe_open(path, "pt") as file:
        return json.loads(file.metadata()["progress"])


def train(args: argparse.Namespace, model: LlamaForCausalLM, texts: list[str], heldout: str) -> dict[str, float]:
    """Train until the limit of steps or minutes is reached; write a checkpoint about every minute."""
    windows = Windows(texts, args.tokens_per_step, args.seed)
    optimizer = Optimizer(model, args.muon_rate, args.adam_rate)
    path = args.work / "checkpoint.safetensors"
    done = load_checkpoint(path, model, optimizer)
    print(f"{len(windows.stream):,} training tokens, {model.num_parameters():,} parameters; at step {done['step']:.0f}")
    clock = saved = time.monotonic()
    losses: list[float] = []
    while (share := max(done["step"] / args.steps, done["seconds"] / 60 / args.minutes)) < 1:
        length = next(n for start, n in reversed(PHASES) if share >= start)
        loss = loss_of(model, windows.batch(int(done["step"]), length))
        loss.backward()
        done["step"] += 1
        optimizer.step(int(done["step"]), min(done["step"] / 20, (1 - share) ** 1.5))
        losses.append(loss.item() / math.log(2))
        if done["step"] % args.report == 0:
            # measured at the current window length, which grows during training
            bits = heldout_bits(model, heldout, length, limit=24 * CHUNK)
            speed = done["step"] * args.tokens_per_step / max(done["seconds"], 1e-9)
            print(f"step {done['step']:.0f}/{args.steps} {share:4.0%}  windows of {length}", end="  ")
            print(f"bits/byte: train {np.mean(losses):.3f} held-out {bits:.3f}", end="  ")
            print(f"{speed:,.0f} tokens/s  {done['seconds'] / 60:.1f} min", flush=True)
            losses.clear()
        now = time.monotonic()
        done["seconds"] += now - clock
        clock = now
        if now - saved > 60:
            save_checkpoint(path, model, optimizer, done)
            saved = now
    save_checkpoint(path, model, optimizer, done)
    return done


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    root = Path(__file__).resolve().parent.parent
    parser.add_argument("--out", type=Path, default=root / "fastdecode" / "demo_model", help="folder of the model")
    parser.add_argument(
        "--work",
        type=Path,
        default=root / "out" / "demo_model",
        help="folder of the checkpoint; delete it to start anew",
    )
    parser.add_argument("--steps", type=int, default=3400, help="optimizer steps")
    parser.add_argument(
        "--minutes", type=float, default=20, help="minutes of training, at most; the schedule fits itself"
    )
    parser.add_argument("--tokens-per-step", type=int, default=2048, help=f"tokens per step, a multiple of {CHUNK}")
    parser.add_argument("--muon-rate", type=float, default=0.025, help="peak learning rate of the layers' matrices")
    parser.add_argument("--adam-rate", type=float, default=0.015, help="peak learning rate of all other parameters")
    parser.add_argument("--hidden", type=int, default=192, help="hidden size")
    parser.add_argument("--intermediate", type=int, default=512, help="width of the feed-forward blocks")
    parser.add_argument("--layers", type=int, default=4, help="transformer layers")
    parser.add_argument(
        "--code-only",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="leave out docstrings and comment lines: half as much to learn, and no prose that never ends",
    )
    parser.add_argument("--report", type=int, default=100, help="steps between progress lines")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads")
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data order")
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(args.threads)
    texts, heldout, names = stdlib_split(args.code_only)
    model = new_model(args)
    done = train(args, model, texts, heldout)
    export(args.out, model, heldout)
    tokens = int(done["step"]) * args.tokens_per_step
    how = f"{done['step']:.0f} steps, {tokens / 1e6:.1f} million tokens, {args.threads} CPU threads, float32."
    write_readme(args.out, how, names, args.code_only)
    print((args.out / "README.md").read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
