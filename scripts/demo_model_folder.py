"""Writes and measures the demo model's folder: its text, byte tokenizer and files, and how good its completions are.

``train_demo_model.py`` imports this module. Alone, ``python scripts/demo_model_folder.py [folder]`` measures a folder.
"""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import json
import math
import re
import sys
import sysconfig
import textwrap
import tokenize
import warnings
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaForCausalLM

BOS, EOS, PAD, VOCAB = 256, 257, 258, 264
"""Ids 0..255 are the byte values; 259..263 only round the vocabulary up."""
SKIPPED_FOLDERS = {"site-packages", "test", "tests", "idle_test", "lib2to3", "pydoc_data", "encodings", "__pycache__"}
HELDOUT_EVERY, HELDOUT_BYTES = 50, 96_000


def only_code(text: str) -> str:
    """Return the text without docstrings and comment lines, so that only code remains."""
    lines = text.splitlines(keepends=True)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and token.line.lstrip().startswith("#"):
            lines[token.start[0] - 1] = ""
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            left = "" if len(node.body) > 1 else " " * first.col_offset + "pass\n"
            lines[first.lineno - 1 : first.end_lineno] = [left] + [""] * ((first.end_lineno or 0) - first.lineno)
    return re.sub(r"(:\n)\n+(?= )", r"\1", re.sub(r"\n(?:[ \t]*\n){3,}", "\n\n\n", "".join(lines))).strip() + "\n"


def stdlib_split(code_only: bool = False) -> tuple[list[str], str, list[str]]:
    """Return the texts of the training files, a held-out text, and the names of the files in the held-out text.
    A hash of each file's content decides whether it is held out.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    train: list[str] = []
    heldout: list[tuple[str, str, str]] = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts[:-1]):
            continue
        try:
            with tokenize.open(path) as file:
                text = file.read()
            ast.parse(text)
            text = only_code(text) if code_only else text
        except (SyntaxError, UnicodeDecodeError, tokenize.TokenError):
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if int(digest, 16) % HELDOUT_EVERY == 0:
            heldout.append((digest, relative.as_posix(), text))
        elif text:
            train.append(text)
    pieces: list[str] = []
    names: list[str] = []
    for _, name, text in sorted(heldout):
        if text and sum(len(piece) for piece in pieces) < HELDOUT_BYTES:
            pieces.append(text[: text.rfind("\n", 0, HELDOUT_BYTES // 8) + 1])
            names.append(name)
    return train, "".join(pieces), names


def loss_of(model: LlamaForCausalLM, ids: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood, in nats, of each token after the first."""
    logits = model(input_ids=ids[:, :-1], use_cache=False).logits.float()
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


@torch.no_grad()
def heldout_bits(model: LlamaForCausalLM, text: str, window: int = 1024, limit: int | None = None) -> float:
    """Return the model's bits per byte over consecutive windows of ``window`` bytes, each after a bos token."""
    data = np.frombuffer(text.encode()[:limit], np.uint8).astype(np.int64)
    rows = data[: len(data) // window * window].reshape(-1, window)
    ids = torch.from_numpy(np.concatenate([np.full((len(rows), 1), BOS), rows], axis=1))
    return sum(float(loss_of(model, part)) * len(part) for part in ids.split(4)) / len(ids) / math.log(2)


def byte_tokenizer() -> Tokenizer:
    """Return a tokenizer of the 256 bytes, each its own id, with bos (the first token of every text), eos and pad."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}
    tokenizer = Tokenizer(models.BPE(alphabet, []))
    tokenizer.add_special_tokens(["<|bos|>", "<|eos|>", "<|pad|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing("<|bos|> $A", None, [("<|bos|>", BOS)])
    return tokenizer


def parses(completion: str) -> bool:
    """Return whether a function is valid Python.
    Up to three last lines may be left out, as generation may have cut it.
    """
    end = re.search(r"\n(?=[^\s#)\]}])", completion[completion.index(":\n") :])
    if end:
        tries = [completion[: completion.index(":\n") + end.end()]]
    else:
        lines = completion.split("\n")
        tries = ["\n".join(lines[:-cut]) for cut in range(1, 5)]
    for text in tries:
        with contextlib.suppress(SyntaxError, ValueError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ast.parse(text)
            return True
    return False


@torch.no_grad()
def complete(folder: Path, prompts: list[str], temperature: float = 0.0, tokens: int = 256) -> list[str]:
    """Return the prompts, each followed by transformers' completion in float32. ``temperature`` 0 means greedy."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left", local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    inputs = tokenizer(prompts, return_tensors="pt", padding=True)
    how = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    out = model.generate(**inputs, max_new_tokens=tokens, **how)
    return tokenizer.batch_decode(out, skip_special_tokens=True)


def heldout_headers(text: str, count: int) -> list[str]:
    """Return ``count`` function headers of the text, without indentation. A hash chooses them."""
    headers = {textwrap.dedent(header) for header in re.findall(r"^ *def [^\n]*\):\n", text, re.M)}
    return sorted(headers, key=lambda header: hashlib.sha256(header.encode()).digest())[:count]


def measure(folder: Path, headers: int = 64) -> str:
    """Return Markdown lines on how well the folder's model predicts and completes its held-out text."""
    text = (folder / "heldout.txt").read_text(encoding="utf-8")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    lines = [f"- {model.num_parameters():,} parameters, {(folder / 'model.safetensors').stat().st_size:,} bytes"]
    for window in (512, 1024, 2048):
        bits = heldout_bits(model, text, window)
        lines.append(
            f"- held-out, windows of {window} bytes: {bits:.3f} bits per byte, perplexity {2**bits:.3f} per byte"
        )
    torch.manual_seed(0)
    prompts = heldout_headers(text, headers)
    for name, temperature in (("greedy", 0.0), ("temperature 0.5", 0.5), ("temperature 0.8", 0.8)):
        share = sum(map(parses, complete(folder, prompts, temperature))) / len(prompts)
        lines.append(f"- {len(prompts)} held-out function headers completed by 256 bytes, {name}: {share:.0%} parse")
    return "\n".join(lines) + "\n"


def export(out: Path, model: LlamaForCausalLM, heldout: str) -> None:
    """Write the model folder: weights, configuration, tokenizer, held-out text and its licence."""
    out.mkdir(parents=True, exist_ok=True)
    model.generation_config = GenerationConfig(
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, do_sample=True, temperature=0.5
    )
    model.save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    byte_tokenizer().save(str(out / "tokenizer.json"))
    names = {f"{name}_token": f"<|{name}|>" for name in ("bos", "eos", "pad")}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **names}
    settings["model_max_length"] = model.config.max_position_embeddings
    (out / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (out / "heldout.txt").write_text(heldout, encoding="utf-8")
    licence = Path(sysconfig.get_paths()["stdlib"]) / "LICENSE.txt"
    if licence.exists():
        (out / "LICENSE.python.txt").write_text(licence.read_text(encoding="utf-8"), encoding="utf-8")


def write_readme(out: Path, how: str, heldout_names: list[str], code_only: bool) -> None:
    """Write a README in the folder: what the model is, how it was trained, and how good it is."""
    (out / "README.md").write_text(
        f"""# Demo model

A byte-level Llama (grouped-query attention) that completes Python: small enough to ship, good enough to see whether a
key-value cache was handled well. It knows nothing but its training text, and is no programmer.

- Made by `scripts/train_demo_model.py`: {how}
- Training text: the source of Python's standard library ({sys.version.split()[0]}), without tests, codec tables and
  generated topics{", docstrings and comment lines" if code_only else ""}; 1 file in {HELDOUT_EVERY}, by hash of its
  content, was never trained on.
- `heldout.txt`: the beginnings of held-out files, treated likewise ({", ".join(heldout_names)}).
- Tokens: ids 0 to 255 are the bytes; 256 bos (every text begins with it), 257 eos (end of a file), 258 pad; the rest
  of the vocabulary's {VOCAB} is unused.
- Licence of the text, and of `heldout.txt`: PSF License Agreement, Copyright (c) 2001-2023 Python Software Foundation;
  All Rights Reserved; see `LICENSE.python.txt`.

Measured by `python scripts/demo_model_folder.py`, with plain transformers in float32:

{measure(out)}""",
        encoding="utf-8",
    )


if __name__ == "__main__":
    print(measure(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent.parent / "fastdecode/demo_model"))
