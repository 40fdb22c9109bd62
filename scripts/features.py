"""Write docs/features.md, which says which features work together: python scripts/features.py

For a pair that ``EngineConfig`` refuses, the page has the reason. For other pairs, the script counts in how many of
NUM_ROUNDS rounds `make chaos` (tests/chaos) draws both, with the same seeds each time.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from chaos.configuration import HYBRIDS, Configuration, accepted_settings, draw  # noqa: E402

from fastdecode.api.config import EngineConfig  # noqa: E402
from fastdecode.core.errors import ConfigError  # noqa: E402
from fastdecode.engine.compose.setup import check_ways  # noqa: E402
from fastdecode.kinds import Dense, Recurrent  # noqa: E402
from fastdecode.kinds.layout import KVLayout  # noqa: E402
from fastdecode.kinds.recurrent import RANGES  # noqa: E402

PAGE = ROOT / "docs" / "features.md"
NUM_ROUNDS = 1000

STATES, STATES_HERE = "recurrent states", "states at the S-worker"
SETTINGS: dict[str, dict[str, Any]] = {
    "ranges": {"kv_shard_tokens": 512},
    "two copies": {"kv_replicas": 2},
    "prefill workers": {"prefill_workers": "spawn:1"},
    "ranks": {"tensor_parallel_size": 2},
    "n-gram drafts": {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}},
    "early-exit drafts": {"speculative_config": {"method": "early_exit", "num_speculative_tokens": 2, "num_layers": 1}},
    "draft model": {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 2, "model": "demo"}},
    "prefixes": {"enable_prefix_caching": True},
    "scratch": {"prefill_scratch": "16MiB"},
    "16 bits": {"dtype": "bfloat16"},
    "int8, int4": {"kv_cache_dtype": "int8"},
    "latents absorbed by R-workers": {"latent_absorption": "r"},
    "sls": {"schedule": "sls"},
    "prefill-first": {"schedule": "prefill-first"},
    "request-level, hybrid": {"schedule": "request-level"},
    "MPI": {"r_workers": "mpi"},
    "Ray": {"r_workers": "ray:2"},
    "parked prefixes": {"park_dir": "parked"},
    "server": {},
    STATES: {},
    STATES_HERE: {"state_on": "s"},
}
"""Features that a user can turn on, with settings that do so."""

LAYOUT = KVLayout(
    (
        Dense(1, 1, 16, 16, 1.0),
        Recurrent(1, 16, 1.0, "window", 0, 0, 3, 0, False, False, 16),
    ),
    "float32",
    "float32",
)
"""The layout of a hybrid: one layer with attention, and one with a state."""

Test = Callable[[Configuration, dict[str, Any]], bool]

DRAWN: dict[str, Test] = {
    "ranges": lambda drawn, settings: "kv_shard_tokens" in settings,
    "two copies": lambda drawn, settings: settings.get("kv_replicas", 1) == 2,
    "prefill workers": lambda drawn, settings: "prefill_workers" in settings,
    "ranks": lambda drawn, settings: "tensor_parallel_size" in settings,
    "n-gram drafts": lambda drawn, settings: _method(settings) == "ngram",
    "early-exit drafts": lambda drawn, settings: _method(settings) == "early_exit",
    "draft model": lambda drawn, settings: _method(settings) == "draft_model",
    "prefixes": lambda drawn, settings: settings["enable_prefix_caching"],
    "scratch": lambda drawn, settings: "prefill_scratch" in settings,
    "16 bits": lambda drawn, settings: settings["dtype"] != "float32",
    "int8, int4": lambda drawn, settings: settings["kv_cache_dtype"] in ("int8", "int4"),
    "latents absorbed by R-workers": lambda drawn, settings: settings.get("latent_absorption") == "r",
    "sls": lambda drawn, settings: settings["schedule"] == "sls",
    "prefill-first": lambda drawn, settings: settings["schedule"] == "prefill-first",
    "request-level, hybrid": lambda drawn, settings: settings["schedule"] in ("request-level", "hybrid"),
    "MPI": lambda drawn, settings: drawn.pool == "mpi",
    "Ray": lambda drawn, settings: drawn.pool == "ray",
    "parked prefixes": lambda drawn, settings: "park_dir" in settings,
    "server": lambda drawn, settings: drawn.kind == "serve",
    STATES: lambda drawn, settings: drawn.architecture in HYBRIDS,
    STATES_HERE: lambda drawn, settings: settings.get("state_on") == "s",
    "a kill": lambda drawn, settings: _has(drawn, "kill"),
    "a drain": lambda drawn, settings: _has(drawn, "drain") or _has(drawn, "terminate"),
    "a join": lambda drawn, settings: _has(drawn, "join"),
    "an abort": lambda drawn, settings: any(ask.abort is not None for ask in drawn.asks),
    "n > 1": lambda drawn, settings: any(ask.params.get("n", 1) > 1 for ask in drawn.asks),
    "a form": lambda drawn, settings: any("structured_outputs" in ask.params for ask in drawn.asks),
}
"""For each feature, whether a round draws it: first features that are turned on, then events such as losses."""

HEAD = """# Which features work together

All pairs of these give the tokens of one undisturbed R-worker, but those below: {features}.

Ranks add sums in another order, so their equality holds in float32. `make chaos` draws the pairs; the site counts how
often.

`python scripts/features.py` writes this page.
"""

MATRIX_HEAD = f"""# How often chaos draws each pair

Rounds of `make chaos`, of {NUM_ROUNDS:,} (seeds from 0 on), that draw both features. A dot: accepted, and no round
draws both.

"""


def main() -> None:
    PAGE.write_text(rendered(), encoding="utf-8")


def rendered() -> str:
    """Return the page with the refused pairs of features, by reason."""
    by_reason: dict[str, list[frozenset[str]]] = {}
    for pair, reason in _refusals().items():
        by_reason.setdefault(reason, []).append(pair)
    parts = [HEAD.format(features=", ".join(SETTINGS)), "## Refused\n"]
    for reason, pairs in by_reason.items():
        names = "; ".join(" + ".join(sorted(pair, key=list(SETTINGS).index)) for pair in pairs)
        parts.append(f"- **{names}**: {reason}")
    return "\n".join(parts) + "\n" + _of_states() + "\n"


def matrix() -> str:
    """Return a page with a table: in how many of NUM_ROUNDS rounds each pair of features is drawn."""
    counts, refusals = _counts(), _refusals()
    settings, events = list(SETTINGS), [name for name in DRAWN if name not in SETTINGS]
    lines = ["| | " + " | ".join(settings) + " |", "|---" * (len(settings) + 1) + "|"]
    for name in [*settings[1:], *events]:
        cells = [_cell(name, other, counts, refusals) for other in settings]
        lines.append(f"| **{name}** | " + " | ".join(cells) + " |")
    return MATRIX_HEAD + "\n".join(lines) + "\n"


def _cell(name: str, other: str, counts: Counter[frozenset[str]], refusals: dict[Any, str]) -> str:
    pair, order = frozenset((name, other)), list(SETTINGS)
    if name in SETTINGS and order.index(other) >= order.index(name):
        return ""
    if pair in refusals:
        return "no"
    if name in SETTINGS and set(SETTINGS[name]) & set(SETTINGS[other]):
        return ""
    return str(counts[pair] or "·")


def _counts() -> Counter[frozenset[str]]:
    """Return, for each pair of features, in how many rounds both are drawn."""
    counts = Counter[frozenset[str]]()
    for seed in range(NUM_ROUNDS):
        drawn = draw(seed)
        pool = "mpi" if drawn.pool == "mpi" else "spawn:2"
        settings = accepted_settings(
            drawn, lambda given, pool=pool: EngineConfig(**given, device="cpu", r_workers=pool)
        )  # type: ignore[misc]
        found = [name for name, is_drawn in DRAWN.items() if is_drawn(drawn, settings)]
        counts.update(frozenset(pair) for pair in combinations(found, 2))
    return counts


def _refusals() -> dict[frozenset[str], str]:
    """Return the reason for each refused pair of features. Each feature alone is accepted."""
    found = {}
    for states, (name, settings) in product((STATES, STATES_HERE), SETTINGS.items()):
        try:
            check_ways(EngineConfig(device="cpu", **settings | SETTINGS[states]), LAYOUT, on_gpu=False)
        except ConfigError as error:
            found[frozenset((name, states))] = str(error)
    for (name, one), (other, two) in combinations(SETTINGS.items(), 2):
        if not set(one) & set(two):
            try:
                EngineConfig(device="cpu", **one, **two)
            except ConfigError as error:
                found[frozenset((name, other))] = str(error)
    return found


def _of_states() -> str:
    """Return the text of further refusals for models with recurrent states."""
    kept = {"state_on": "s", "r_workers": "localhost:1", "session": "s", "journal": "r-workers", "keep_session": 9.0}
    alone = replace(LAYOUT, layers=LAYOUT.layers[1:])
    found = [
        f"- {_refusal(settings, layout, on_gpu)}"
        for settings, layout, on_gpu in (
            ({"state_on": "s"}, alone, False),
            (kept, LAYOUT, False),
            ({"prefill_parallel": "tsp"}, LAYOUT, False),
            ({}, LAYOUT, True),
        )
        if _refusal(settings, layout, on_gpu)
    ]
    others = (SETTINGS[name] for name in ("ranks", "parked prefixes", "prefill workers"))
    not_in_ranges = [_refusal(each | SETTINGS["ranges"]) for each in (*others, kept | {"state_on": "r"})]
    settings = [
        f"{name}: {_between(text, ', and ', ';')}."
        for name, _, text in (each.partition(": ") for each in not_in_ranges)
    ]
    found.append(f"- {RANGES} and refuses these settings. {' '.join(settings)}")
    return "\nOf recurrent states also:\n\n" + "\n".join(found)


def _refusal(settings: dict[str, Any], layout: KVLayout = LAYOUT, on_gpu: bool = False) -> str:
    """Return why a model of ``layout`` refuses ``settings``; "" if it accepts them."""
    try:
        check_ways(EngineConfig(device="cpu", **settings), layout, on_gpu)
    except ConfigError as error:
        return str(error)
    return ""


def _between(text: str, first: str, last: str) -> str:
    return text.partition(first)[2].partition(last)[0]


def _method(settings: dict[str, Any]) -> str:
    return str(settings.get("speculative_config", {}).get("method"))


def _has(drawn: Configuration, action: str) -> bool:
    return any(action in event.action for event in drawn.events)


if __name__ == "__main__":
    main()
