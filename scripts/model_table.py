"""Try every causal language model of the installed transformers, and write docs/models.md: `make models`.

Each is built tiny with random weights. The engine's greedy tokens and their log-probabilities are compared with those
of ``generate``, in a child process with limits of time and memory. ``python scripts/model_table.py NAME …`` prints the
rows of the named models only.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

import torch  # noqa: E402
import transformers  # noqa: E402
from helpers import model_zoo  # noqa: E402
from helpers.tiny_configs import kind_of_cache, tiny_config  # noqa: E402
from model_page import page  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # noqa: E402

from fastdecode import LLM, SamplingParams  # noqa: E402
from fastdecode.core.errors import FastDecodeError, UnsupportedModelError  # noqa: E402
from fastdecode.kinds import Dense, Layer  # noqa: E402
from fastdecode.perfmodel.model_config import read_shape  # noqa: E402
from fastdecode.sworker.model.loader import WITH_PICTURES, auto_class  # noqa: E402

PAGE = ROOT / "docs" / "models.md"
DATA = ROOT / "docs" / "assets" / "models.json"
NEW_TOKENS = 16
PROMPT_LENGTHS = (70, 5, 30)
LIMIT_SECONDS = 120
LIMIT_BYTES = 6 << 30
MOST_APART = 1e-2
"""Most difference between log-probabilities of one token; float32 rounding reaches about 1e-4 of it."""

SPREADS = (0.15, 0.4, 1.0)
"""Standard deviations of weights, tried until greedy tokens vary. If few tokens occur, any attention would pass."""


@dataclass(frozen=True)
class Row:
    """One architecture. ``result``: "exact", "refused", "not tried"; or "differs" or "crashed", which are bugs.
    ``cache``: what a layer keeps of earlier tokens. ``distinct``: number of different tokens in the outputs; equal
    outputs prove little if there are few.
    """

    model_type: str
    result: str
    reason: str = ""
    cache: str = ""
    distinct: int = 0


def model_types() -> list[str]:
    """Return every model type of transformers that is a causal language model, or that has one as its text part."""
    return sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *WITH_PICTURES})


def tried(model_type: str) -> Row:
    """Build, run and compare one architecture in this process."""
    try:
        config = tiny_config(model_type)
        cache = kind_of_cache(config)
    except Exception as error:
        return Row(model_type, "not tried", f"no tiny configuration: {_line(error)}")
    try:
        model = auto_class(model_type).from_config(config, attn_implementation="eager", dtype=torch.float32)
    except Exception as error:
        return Row(model_type, "not tried", f"transformers builds none: {_line(error)}", cache)
    model.generation_config.eos_token_id = None
    for spread in SPREADS:
        model_zoo.randomised(model, spread, SPREADS[0])
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder)
            if type(model.config) is not type(config):
                config.save_pretrained(folder)  # published folders have the whole model's configuration
            row = _compared(model_type, model, folder, cache)
        if row.result != "exact" or row.distinct > 4:
            break
    return row


def prompts() -> list[list[int]]:
    """Return prompts of random tokens, with the lengths PROMPT_LENGTHS."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(8, 120, (length,), generator=generator).tolist() for length in PROMPT_LENGTHS]


def _compared(model_type: str, model: Any, folder: str, cache: str) -> Row:
    """Run the model in ``folder``, loaded as ``model``, in the engine and in transformers; compare the outputs."""
    try:
        found, cache = _engine_tokens(folder)
    except UnsupportedModelError as error:
        return Row(model_type, "refused", _short(str(error)), cache)
    except Exception as error:
        traceback.print_exc()
        return Row(model_type, "crashed", f"{type(error).__name__}: {_line(error)}", cache)
    try:
        expected = [_generated(model, prompt) for prompt in prompts()]
    except Exception as error:
        traceback.print_exc()
        return Row(model_type, "not tried", f"generate itself fails: {_line(error)}", cache)
    distinct = len({token for tokens, _ in expected for token in tokens})
    if reason := next(filter(None, map(_difference, found, expected)), ""):
        print(found, expected, sep="\n")
    return Row(model_type, "differs" if reason else "exact", reason, cache, distinct)


Output = tuple[list[int], list[float]]
"""Greedy tokens, and the log-probability of each."""


def _difference(found: Output, expected: Output) -> str:
    """Return where ``found`` differs from ``expected``; "" if nowhere."""
    for index, (token, right, log, right_log) in enumerate(
        zip(found[0], expected[0], *(found[1], expected[1]), strict=True)
    ):
        if token != right or abs(log - right_log) > MOST_APART:
            return f"token {index} is {token} at {log:.3f}, not {right} at {right_log:.3f}"
    return ""


def _engine_tokens(folder: str) -> tuple[list[Output], str]:
    """Return the engine's outputs for all prompts at once, and the kinds of its layers' caches."""
    settings: dict[str, Any] = {"device": "cpu", "skip_tokenizer_init": True, "max_model_len": 128, "dtype": "float32"}
    settings |= {"kv_cache_memory": "32MiB", "s_threads": 1, "r_threads": 1}
    with LLM(folder, **settings) as llm:
        cache = _kept(llm.engine.s_model.layout.layers)
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=1)
        outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts()], params, use_tqdm=False)
    completions = [output.outputs[0] for output in outputs]
    return [_with_logs(each.token_ids, each.logprobs) for each in completions], cache


def _with_logs(token_ids: Any, logprobs: Any) -> Output:
    return list(token_ids), [each[token].logprob for token, each in zip(token_ids, logprobs, strict=True)]


def _kept(layers: Any) -> str:
    return ", ".join(dict.fromkeys(map(_kept_by, layers)))


def _kept_by(layer: Layer) -> str:
    if isinstance(layer, Dense):
        return "chunked" if layer.chunked else "window" if layer.window else "full"
    return {"recurrent": "state", "index": "sparse"}.get(layer.kind, layer.kind)


def _generated(model: Any, prompt: list[int]) -> Output:
    """Return transformers' greedy output."""
    ids = torch.tensor([prompt])
    settings = {
        "do_sample": False,
        "max_new_tokens": NEW_TOKENS,
        "return_dict_in_generate": True,
        "output_logits": True,
    }
    result = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    tokens = result.sequences[0, len(prompt) :].tolist()
    logs = [each[0].float().log_softmax(-1)[token].item() for each, token in zip(result.logits, tokens, strict=True)]
    return tokens, logs


def _short(message: str) -> str:
    """Return a refusal's message without the words that all refusals have."""
    reason = message.partition(": this model ")[2].partition("; supported are")[0]
    return reason.replace(", so its attention cannot be handed to R-workers", "")


def _line(error: BaseException) -> str:
    return " ".join(str(error).split())[:160] or type(error).__name__


def bytes_per_token(model_type: str) -> str:
    """Return the bytes of a token's keys and values in 16 bits, for the type's default configuration; "" if unknown."""
    try:
        shape = read_shape(transformers.CONFIG_MAPPING[model_type]().to_dict(), model_type)
        return f"{shape.kv_bytes_per_token('bfloat16'):,}"
    except (FastDecodeError, ValueError):
        return ""


def in_a_fork(model_type: str, run: Callable[[str], Row] = tried) -> Row:
    """Call ``run`` in a child process with limits. Return a row even if that process crashes."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setsid()
            _limit()
            os.write(writer, json.dumps(asdict(run(model_type))).encode())
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    os.close(writer)
    text = _read(reader, time.monotonic() + LIMIT_SECONDS)
    if text is None:
        os.killpg(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if text:
        return Row(**json.loads(text))
    why = f"ran past {LIMIT_SECONDS} s" if text is None else f"ended with status {os.waitstatus_to_exitcode(status)}"
    return Row(model_type, "crashed", why)


def _limit() -> None:
    pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE") + LIMIT_BYTES,) * 2)
    quiet = os.open(os.environ.get("MODEL_TABLE_LOG", os.devnull), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)


def _read(reader: int, until: float) -> bytes | None:
    """Return everything that the child process writes; None if the time limit is reached."""
    parts = []
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        while select.select([pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            if not (part := pipe.read(1 << 16)):
                return b"".join(parts)
            parts.append(part)
    return None


def record(row: Row) -> dict[str, str]:
    """Return a row in the form of docs/assets/models.json."""
    size = bytes_per_token(row.model_type) if row.result == "exact" else ""
    fields = {"architecture": row.model_type, "cache": row.cache, "bytes_per_token": size, "result": row.result}
    return fields | {"reason": row.reason}


def main(names: list[str]) -> None:
    """Try the named models and print their rows; without names, try all and write the page."""
    torch.set_num_threads(1)
    rows = []
    for name in names or model_types():
        rows.append(row := in_a_fork(name))
        print(f"{row.result:9} {row.model_type:24} {row.distinct:3} [{row.cache}] {row.reason}", flush=True)
    if not names:
        records = [record(row) for row in rows]
        DATA.write_text(json.dumps({"transformers": transformers.__version__, "rows": records}, indent=1), "utf-8")
        PAGE.write_text(page(transformers.__version__, records), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
