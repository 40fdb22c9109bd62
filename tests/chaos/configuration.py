"""Draws a round from one seed: settings, requests and events."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from chaos.parking import draw_parking
from fastdecode.core.errors import ConfigError

SCHEDULES = ("sls", "stall-free", "fcfs", "request-level", "hybrid", "prefill-first")
PLAIN = (
    "llama-gqa", "llama-mha", "mistral", "qwen2", "qwen3", "gpt_neox", "gemma2", "opt", "gpt_bigcode", "gpt_oss",
    "deepseek_v3", "deepseek_v32", "glm_moe_dsa", "minimax_m3",
)  # fmt: skip
LONG = ("llama-gqa", "qwen2", "qwen3", "mistral", "deepseek_v3", "deepseek_v32", "minimax_m3")
"""Architectures with computed positions, which therefore accept texts longer than their configuration says."""

SHARED = ("llama-gqa", "qwen2", "qwen3", "deepseek_v3")
"""Architectures that several tensor-parallel ranks can share."""

LATENT = ("deepseek_v3", "deepseek_v32", "glm_moe_dsa")
"""Architectures for which R-workers can multiply K and V."""

SPARSE = ("deepseek_v32", "glm_moe_dsa", "minimax_m3")
"""Architectures with an index, which picks the tokens that queries see.
In ranges, scores are added in another order, so tokens equal those of one R-worker only in float32.
"""

HYBRIDS = ("qwen3_next", "falcon_h1", "lfm2")
"""Architectures with recurrent states, which replace others in some rounds."""

DEMO = "demo"
"""The demo model of the package, the only one with a tokenizer."""

CALIBRATED = ("llama-gqa", "llama-mha", "mistral", "qwen2", "qwen3", "gemma2", DEMO)
"""Architectures whose int8 weights can be rounded again, since every operation has the same bits on every machine."""

BETWEEN = "between steps"
WHERE = (
    "before admit", "after transfers.begin_next", "after controls_alone", "before export", "before import_",
    "after import_", "before transfers.done", "before drafts.grant", "before schedule", "before begin_step",
    "after begin_step", "before submit", "after submit", "before collect", "before end_step", "after end_step",
    "before commit", "after commit", "before dismiss",
)  # fmt: skip
"""Boundaries at which events occur: before or after a call of the scheduler, of one of its parts, or of the backend."""


KINDS = {"plain": 10, "ranks": 2, "prefill": 3, "serve": 2, "mpi": 2, "ray": 1}
"""Kinds of rounds, with weights.
They are: an engine over R-workers; two ranks; prefill workers; clients of ``fastdecode serve``; an MPI job; Ray actors.
"""

SMALL = ("plain",)
"""Kinds of rounds that start no further process that imports torch."""

OPTIONAL = ("kv_shard_tokens", "kv_replicas", "speculative_config", "prefill_workers", "park_dir")
"""Settings that are dropped one after another if the engine refuses them together."""

LATEST = 0.7
"""Events occur within this share of the reference's steps, since a round with drafts may need fewer steps."""


@dataclass(frozen=True)
class Event:
    """An event: ``action`` on number ``target`` of its possible targets.
    It happens at the ``occurrence``-th ``boundary``, counted from step ``share`` times the reference's number of steps.
    """

    share: float
    boundary: str
    occurrence: int
    action: str
    target: int


@dataclass(frozen=True)
class Ask:
    """A request that arrives before step ``step``. If ``abort`` is set, it is aborted before that step."""

    step: int
    prompt: list[int] | str
    params: dict[str, Any]
    abort: int | None


@dataclass(frozen=True)
class Configuration:
    """A round. ``kind``: one of KINDS.
    ``pool``: inproc, spawn, tcp, mpi or ray. ``memory_tokens``: tokens that fit one R-worker; 0 for plenty.
    """

    seed: int
    kind: str
    architecture: str
    settings: dict[str, Any]
    pool: str
    num_workers: int
    memory_tokens: int
    forces_drafts: bool
    asks: list[Ask]
    events: list[Event]

    def __str__(self) -> str:
        """Return the configuration in one line, without the prompts."""
        names = {name: value for name, value in asdict(self).items() if name not in ("asks", "events", "seed")}
        return f"{names}, {len(self.asks)} requests"


def draw(seed: int, kinds: Sequence[str] = tuple(KINDS), is_small: bool = False) -> Configuration:
    """Return the round of ``seed``, of one of ``kinds``. ``is_small``: few R-workers and short requests."""
    rng = random.Random(seed)
    kind = rng.choices(kinds, [KINDS[each] for each in kinds])[0]
    has_ranges = rng.random() < (0.2 if is_small else 0.35)
    if kind == "serve" or (kind == "plain" and rng.random() < 0.12):
        architecture, has_ranges = DEMO, False
    else:
        architecture = rng.choice(SHARED if kind == "ranks" else LONG if has_ranges else PLAIN)
    longest = 2600 if has_ranges else 400
    pools = {"ranks": ["spawn"], "serve": ["spawn", "tcp"], "mpi": ["mpi"], "ray": ["ray"]}
    pool = rng.choice(pools.get(kind, ["inproc", "spawn", "spawn", "tcp", "tcp"][: 4 if is_small else 5]))
    num_workers = rng.randint(2, 2 if is_small else 3 if kind in ("ranks", "mpi", "ray") else 4)
    settings = _draw_settings(rng, kind, has_ranges, longest, architecture)
    kinds_of_hybrids = ("plain", "mpi", "ray") if has_ranges else ("plain", "prefill", "ranks")
    hybrid = _draw_hybrid(seed) if kind in kinds_of_hybrids and architecture != DEMO else ""
    if is_small and "model" in settings.get("speculative_config", {}):  # this setting loads another model
        del settings["speculative_config"]
    asks = _draw_asks(rng, kind, has_ranges, architecture, longest, is_small)
    memory = rng.choice([0, longest + 64, longest + 64, longest + 400, 2 * longest])
    if has_ranges and memory and rng.random() < 0.5:  # the longest sequence then needs several R-workers
        length = settings["kv_shard_tokens"]
        memory = length * -(-(longest // length + 1) // num_workers) + 256
    prefill_workers = int(settings.get("prefill_workers", "spawn:0").partition(":")[2])
    events = _draw_events(rng, pool, kind, num_workers, prefill_workers, is_small)
    forces_drafts = rng.random() < 0.7
    if hybrid:  # states need more memory than this many tokens
        architecture, memory, settings = hybrid, 0, _with_states(seed, settings, hybrid)
    settings = _exact(settings | _draw_integers(seed, kind), architecture)
    settings |= _draw_calibration(seed, settings, architecture)
    if not (hybrid and has_ranges):
        settings |= draw_parking(seed, kind, settings, bool(hybrid))
    return Configuration(seed, kind, architecture, settings, pool, num_workers, memory, forces_drafts, asks, events)


def _draw_settings(rng: random.Random, kind: str, has_ranges: bool, longest: int, architecture: str) -> dict[str, Any]:
    dtype = "float32" if kind == "ranks" else rng.choice(["float32", "float32", "bfloat16", "float16"])
    kv = rng.choice(["auto", "auto", "float32" if dtype == "float32" else "auto", "bfloat16", "int8", "int4"])
    settings: dict[str, Any] = {
        "dtype": dtype,
        "kv_cache_dtype": "auto" if kind == "ranks" else kv,
        "block_size": rng.choice([16, 32]),
        "max_model_len": longest,
        "num_mini_batches": rng.choice([1, 2, 2, 3]),
        "max_num_seqs": rng.choice([16, 32]),
        "max_num_batched_tokens": rng.choice([48, 128, 2048]),
        "schedule": rng.choice(SCHEDULES),
        "enable_prefix_caching": rng.random() < 0.6,
        "kv_replicas": rng.choice([1, 1, 2]),
    }
    if has_ranges:
        settings["kv_shard_tokens"] = rng.choice([512, 512, 1024])
    if rng.random() < 0.3:
        settings["prefill_scratch"] = "16MiB"
    if kind == "prefill" or (kind == "ranks" and rng.random() < 0.3):
        settings |= {"prefill_workers": f"spawn:{rng.randint(1, 2)}", "prefill_threads": 1}
    if kind == "ranks":
        settings["tensor_parallel_size"] = 2
    if architecture in SPARSE:
        settings["block_size"] = 16
    is_exact = dtype == "float32" or not (has_ranges or "prefill_workers" in settings)
    if architecture in LATENT and is_exact and rng.random() < 0.5:
        settings["latent_absorption"] = "r"
    if rng.random() < 0.35:
        settings["speculative_config"] = _draw_drafts(rng, architecture)
    return settings


def _exact(settings: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return ``settings`` changed so that tokens equal those of one R-worker."""
    has_ranges = "kv_shard_tokens" in settings
    if architecture in SPARSE and has_ranges:  # ranges reorder sums over picked tokens, which rounding would reveal
        settings = settings | {"dtype": "float32", "kv_cache_dtype": "auto"}
        settings.pop("quantization", None)
    if settings["dtype"] != "float32" and (has_ranges or "prefill_workers" in settings):
        settings.pop("latent_absorption", None)
    return settings


def _draw_hybrid(seed: int) -> str:
    """Return an architecture with states for one round in six, else "".
    A separate generator draws it, so that other rounds stay the same.
    """
    rng = random.Random(f"hybrid {seed}")
    return rng.choice(HYBRIDS) if rng.random() < 1 / 6 else ""


def _with_states(seed: int, settings: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return ``settings`` without those that models with states refuse, with a dtype and a place for the states."""
    refused = {"prefill_scratch", "latent_absorption"}
    has_both = architecture == "falcon_h1"  # each layer has both attention and a state, so early exit is impossible
    if settings.get("speculative_config", {}).get("method") == "early_exit" and has_both:
        refused.add("speculative_config")
    dtype = random.Random(f"states {seed}").choice(("auto", "auto", "float16", "bfloat16"))
    kept = {name: value for name, value in settings.items() if name not in refused}
    if "tensor_parallel_size" in settings:
        return kept
    if "prefill_workers" not in settings and random.Random(f"state on {seed}").random() < 0.5:
        kept |= {"state_on": "s", "state_memory": "1GiB"}
    return kept | {"mamba_ssm_cache_dtype": dtype}


def _draw_integers(seed: int, kind: str) -> dict[str, Any]:
    """Return settings of integer products for one round in four, drawn by a separate generator."""
    rng = random.Random(f"integers {seed}")
    if rng.random() >= 1 / 4:
        return {}
    cache = {"kv_cache_dtype": rng.choice(("auto", "bfloat16", "int8", "int4"))}
    ranks = {"dtype": rng.choice(("float32", "bfloat16", "float16"))} | cache if kind == "ranks" else {}
    return {"quantization": "int8"} | ranks


def _draw_calibration(seed: int, settings: dict[str, Any], architecture: str) -> dict[str, Any]:
    """Return a number of calibration tokens for half the rounds whose int8 weights can be rounded again."""
    can_calibrate = "quantization" in settings and settings["dtype"] != "float16" and architecture in CALIBRATED
    return {"int8_calibration_tokens": 96} if can_calibrate and random.Random(f"again {seed}").random() < 0.5 else {}


def _draw_drafts(rng: random.Random, architecture: str) -> dict[str, Any]:
    method = rng.choice(["ngram", "ngram", "early_exit", "draft_model"])
    drafts: dict[str, Any] = {"method": method, "num_speculative_tokens": rng.randint(1, 4)}
    more = {"ngram": {"prompt_lookup_max": 3, "prompt_lookup_min": 1}, "early_exit": {"num_layers": 1}}
    return drafts | more.get(method, {"model": architecture})


def _draw_asks(
    rng: random.Random, kind: str, has_ranges: bool, architecture: str, longest: int, is_small: bool
) -> list[Ask]:
    beginning = [rng.randrange(250) for _ in range(longest)]
    asks = []
    for _ in range(rng.randint(2, 4) if is_small else rng.randint(3, 14)):
        most = rng.choice([8, 24, 40] if is_small else [8, 24, 40, 64])
        lengths = [20, 300, 700, 1300, 2400] if has_ranges else [1, 7, 40, 130, 300]
        length = rng.choice(lengths[: 4 if is_small else 5])
        shared = rng.choice([0, length // 2, length - 1]) if rng.random() < 0.5 else 0
        prompt = beginning[:shared] + [rng.randrange(250) for _ in range(length - shared)]
        params: dict[str, Any] = {"temperature": 0, "max_tokens": most, "ignore_eos": True, "detokenize": False}
        if kind != "ranks" and rng.random() < 0.35:
            params |= {"temperature": 0.8, "seed": rng.randrange(1000), "n": rng.choice([1, 1, 2, 3])}
        text: list[int] | str = prompt
        if architecture == DEMO:
            text = "".join(chr(97 + token % 26) for token in prompt)
            params["detokenize"] = True
            if rng.random() < 0.5:
                params |= {"structured_outputs": {"regex": "[a-f]{4}-[0-9]{3,40}"}, "ignore_eos": False}
        abort = rng.randint(2, 40) if rng.random() < (0.3 if kind == "serve" else 0.12) else None
        asks.append(Ask(rng.choice([0, 0, 0, 5, 20]), text, params, abort))
    return asks


def accepted_settings(
    drawn: Configuration, check: Callable[[dict[str, Any]], object], refused: Callable[[str], None] = lambda why: None
) -> dict[str, Any]:
    """Return the round's settings without those that ``check`` refuses together.
    ``check`` raises ConfigError; ``refused`` is called with each message.
    """
    settings = dict(drawn.settings)
    names = [name for name in OPTIONAL if settings.get(name, 1) != 1]
    random.Random(drawn.seed).shuffle(names)
    while True:
        try:
            check(settings)
            return settings
        except ConfigError as error:
            if not names:
                raise
            refused(f"without {names[0]}: {error}")
            settings.pop(names.pop(0))
            for name, other in (("prefill_workers", "prefill_threads"), ("park_dir", "park_after")):
                if name not in settings:
                    settings.pop(other, None)


REMOVES = {"kill": 1, "kill two": 2, "kill beside a drain": 2, "drain": 1, "terminate": 1}
"""Number of R-workers that each action removes."""

ACTIONS = {
    "inproc": ["drain", "reset"],
    "spawn": ["kill"] * 3 + ["kill two", "kill beside a drain", "drain", "join", "join", "reset"],
    "tcp": ["kill"] * 3
    + ["kill two", "kill beside a drain", "drain", "terminate", "terminate", *["join"] * 3, "reset"],
    "mpi": ["drain", "drain", "reset"],
    "ray": ["kill"] * 3 + ["drain", "reset"],
}
"""Possible actions by pool."""


def _draw_events(
    rng: random.Random, pool: str, kind: str, num_workers: int, prefill_workers: int, is_small: bool
) -> list[Event]:
    """Return events in order of time. Each is possible after the earlier ones: some R-workers always remain.
    An R-worker that Ray will replace counts as removed.
    """
    possible = ACTIONS[pool] + ["kill prefill"] * 2 * (prefill_workers > 0)
    if kind == "serve":
        possible = [each for each in possible if each not in ("drain", "reset", "kill beside a drain")]
    if is_small and rng.random() < 0.6:  # this action starts another process
        possible = [each for each in possible if each != "join"]
    if kind == "mpi" and rng.random() < 0.3:  # this action ends the job
        return [Event(LATEST * rng.random(), rng.choice(WHERE), 0, "kill rank", rng.randrange(12))]
    most = 3 if is_small or pool == "inproc" else 5 + num_workers
    standing, events = num_workers, list[Event]()
    for share in sorted(LATEST * rng.random() for _ in range(rng.randint(2, most))):
        chosen = [each for each in possible if REMOVES.get(each, 0) < standing]
        action = rng.choice([each for each in chosen if each != "kill prefill" or prefill_workers])
        standing += (action == "join") - REMOVES.get(action, 0)
        prefill_workers -= action == "kill prefill"
        boundary = rng.choice(WHERE) if "kill" in action or action == "join" else BETWEEN
        if action == "kill beside a drain":
            events.append(Event(share, BETWEEN, 0, "drain", rng.randrange(12)))
            action = "kill"
        events.append(Event(share, boundary, rng.choice([0, 0, 0, 1, 2, 5]), action, rng.randrange(12)))
    return events
