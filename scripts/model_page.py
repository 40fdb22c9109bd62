"""The text of docs/models.md, rendered from the rows of ``model_table.py``."""

from __future__ import annotations

import textwrap
from collections import Counter

RESULTS = ("exact", "refused", "not tried", "differs", "crashed")

HEAD = """# Models

Is my model exact? `make models` builds every causal language model of transformers {version} tiny, with random
weights, and runs it beside `generate`. Exact means: equal greedy tokens and log-probabilities in float32. All
others are refused at load with the reason below. Of {count} architectures: {said}.

[What runs](scope.md) has the families, checkpoints and processors.

## Exact

Numbers are KV bytes per token over all layers in 16 bits, for the sizes that the configuration's class has by
default. Ask `fastdecode plan --model FOLDER` for yours. Bold words name what layers keep: all tokens (full), the
last ones (window), rows from which keys and values are computed (latent), rows that an index picks (sparse), or a
state.
"""

TAIL = """
## Where may an exact model differ?

An index that scores two rows the same has no rule which of them it picks: `torch.topk` takes what its sort leaves
first, R-workers the older row. That happens with few index heads (2 in a tiny deepseek_v32), hardly ever with the
64 of published models.
"""


def page(version: str, records: list[dict[str, str]]) -> str:
    """Return docs/models.md: exact architectures grouped by kind of cache, the others by reason."""
    counts = Counter(each["result"] for each in records)
    said = ", ".join(f"{counts[each]} {each}" for each in RESULTS if counts[each])
    parts = [HEAD.format(version=version, count=len(records), said=said)]
    for cache, group in _grouped(records, "exact", "cache"):
        parts.append(_wrapped(f"**{cache or 'a state'}**: " + ", ".join(map(_with_size, group)) + "."))
    for result in RESULTS[1:]:
        groups = _grouped(records, result, "reason")
        if groups:
            parts.append(f"\n## {result.capitalize()}\n")
        for reason, group in groups:
            names = ", ".join(f"`{each['architecture']}`" for each in group)
            parts.append("- " + _wrapped(f"{names}: {reason}", "  "))
    return "\n".join(parts) + "\n" + TAIL


def _grouped(records: list[dict[str, str]], result: str, key: str) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the records with this ``result``, grouped by their values of ``key``, the largest groups first."""
    groups: dict[str, list[dict[str, str]]] = {}
    for each in records:
        if each["result"] == result:
            groups.setdefault(each[key], []).append(each)
    return sorted(groups.items(), key=lambda item: -len(item[1]))


def _with_size(each: dict[str, str]) -> str:
    return f"{each['architecture']} {each['bytes_per_token']}".strip()


def _wrapped(text: str, indent: str = "") -> str:
    lines = textwrap.wrap(text, 116, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines) + ("" if indent else "\n")
