"""``docs/api.md`` gives the signatures that the code has."""

from __future__ import annotations

import inspect
import re
import sys
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import pytest

import fastdecode
from fastdecode import LLM, LLMEngine, RequestOutput, SamplingParams, StructuredOutputsParams
from fastdecode.api import from_vllm
from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import CompletionOutput, Logprob, RequestMetrics
from fastdecode.core.weighing import AttentionSource
from fastdecode.server import foreign_fields

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import vllm_table  # noqa: E402

PAGE = (ROOT / "docs" / "api.md").read_text("utf-8")

INTERNAL = {"scheduler", "replace_scheduler"}
"""Names that are public for tests and benchmarks only, and not promised to users."""


def shown(name: str) -> list[str]:
    """Return how each entry of the list under the heading ``name`` begins."""
    section = PAGE.split(f"\n## {name}\n")[1].split("\n## ")[0]
    return re.findall(r"^- `([^`]*)`:", section, re.MULTILINE)


def methods(kind: type) -> list[str]:
    """Return every public method and property of ``kind``, with its arguments and their defaults."""
    found = [_signature(kind.__name__, kind.__init__)]
    for name, member in vars(kind).items():
        if isinstance(member, property) and not name.startswith("_"):
            found.append(name)
        elif isinstance(member, classmethod):
            found.append(_signature(name, member.__func__))
        elif inspect.isfunction(member) and not name.startswith("_"):
            found.append(_signature(name, member))
    return [each for each in found if each.partition("(")[0] not in INTERNAL]


def _signature(name: str, function: Any) -> str:
    _, *arguments = inspect.signature(function).parameters.values()
    parts = [each.replace(annotation=inspect.Parameter.empty) for each in arguments]
    return f"{name}{inspect.Signature(parts)}"


def arguments(kind: type) -> list[str]:
    """Return every field of a dataclass, with its default where it has one."""
    return [each.name if each.default is MISSING else f"{each.name}={each.default!r}" for each in fields(kind)]


@pytest.mark.parametrize("kind", [LLM, LLMEngine])
def test_methods_are_those_of_the_page(kind: type) -> None:
    assert shown(kind.__name__) == methods(kind)


@pytest.mark.parametrize("kind", [SamplingParams, StructuredOutputsParams])
def test_arguments_are_those_of_the_page(kind: type) -> None:
    assert shown(kind.__name__) == arguments(kind)


def test_fields_of_outputs_are_those_of_the_page() -> None:
    assert shown("RequestOutput") == [
        *(f"{each.name}" for each in fields(RequestOutput)),
        *(f"outputs[i].{name}" for name in CompletionOutput.SEEN),
        *(f"outputs[i].logprobs[t][id].{each.name}" for each in fields(Logprob)),
        *(f"outputs[i].attention_sources[t][k].{name}" for name in AttentionSource._fields),
        *(f"metrics.{name}" for name in RequestMetrics.SEEN),
    ]


@pytest.mark.parametrize(
    ("title", "refused", "ignored"),
    [
        ("Imports that are refused", from_vllm.NAMES, ()),
        ("Methods of `LLM` that are not there", from_vllm.MEMBERS, ()),
        ("Fields of requests", foreign_fields.REFUSED, foreign_fields.IGNORED),
    ],
)
def test_what_is_not_taken_of_vllm_is_on_the_page(title: str, refused: dict[str, str], ignored: frozenset[str]) -> None:
    page = PAGE if f"### {title}\n" in PAGE else vllm_table.full()
    section = re.split(rf"\n###? {re.escape(title)}\n", page)[1].split("\n##")[0]
    assert dict(re.findall(r"^- `([^`]*)`: (.*)$", section, re.MULTILINE)) == refused
    assert ", ".join(f"`{name}`" for name in sorted(ignored)) in section


def test_no_name_of_vllm_s_is_both_taken_and_not() -> None:
    refused, ignored = from_vllm.REFUSED.keys(), from_vllm.IGNORED
    assert not (refused | ignored) & EngineConfig.__dataclass_fields__.keys() and not refused & ignored
    assert set(from_vllm.RENAMED.values()) <= EngineConfig.__dataclass_fields__.keys()
    assert not from_vllm.NAMES.keys() & set(fastdecode.__all__)
    assert not [name for name in from_vllm.MEMBERS if hasattr(LLM, name)]
    assert not foreign_fields.IGNORED & foreign_fields.REFUSED.keys()


def test_every_example_of_the_page_is_python() -> None:
    for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
        compile(code, "api.md", "exec")
