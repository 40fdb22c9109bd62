"""``SamplingParams.structured_outputs``: texts have the form that was asked for, whatever else runs or dies."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from helpers import r_workers
from helpers.engine_checks import assert_nothing_held
from transformers import AutoModelForCausalLM

from fastdecode import LLM, SamplingParams, StructuredOutputsParams
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.api.outputs import RequestOutput
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.sworker.sampling import Sampler, SamplingRow
from fastdecode.sworker.sampling.grammar import Grammars, Matcher

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 8},
        "kind": {"enum": ["module", "class", "é"]},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 999}, "maxItems": 3},
    },
    "required": ["name", "kind", "lines"],
    "additionalProperties": False,
}
SETTINGS: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory": "16MiB", "s_threads": 1, "device": "cpu"}
COMPACT = {"disable_any_whitespace": True}


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    """Yield an LLM with the byte-level demo model."""
    with LLM(**SETTINGS) as llm:
        yield llm
        assert_nothing_held(llm.engine)


def grammars(llm: LLM) -> Grammars:
    model = llm.engine.s_model
    assert model.tokenizer is not None
    return Grammars(model.tokenizer.backend, model.vocab_size, model.eos_token_ids)


def test_grammars_are_prepared_in_any_thread(llm: LLM) -> None:
    """The vocabulary is read once, each form compiled once, and the engine's own call compiles nothing."""
    found, form = grammars(llm), StructuredOutputsParams(json=SCHEMA)
    with ThreadPoolExecutor(4) as threads:
        assert len({id(each) for each in threads.map(lambda _: found.read_vocabulary(), range(8))}) == 1
        threads.submit(found.prepare, form).result()
        with pytest.raises(RequestError, match="cannot be followed"):
            threads.submit(found.prepare, StructuredOutputsParams(regex="(")).result()
    compiled = found.compiled.cache_info()
    assert found.matcher(form).logit_bias(256).max() == 0
    assert found.compiled.cache_info().misses == compiled.misses


def params(form: StructuredOutputsParams, **options: Any) -> SamplingParams:
    return SamplingParams(**{"temperature": 0, "max_tokens": 120, "structured_outputs": form, **options})


def is_allowed_by_schema(text: str) -> bool:
    value = json.loads(text)
    assert list(value) == ["name", "kind", "lines"] and len(value["name"]) <= 8
    assert value["kind"] in ("module", "class", "é") and len(value["lines"]) <= 3
    return all(isinstance(line, int) and 0 <= line <= 999 for line in value["lines"])


def texts(outputs: list[RequestOutput]) -> list[str]:
    assert all(each.finish_reason == "stop" for output in outputs for each in output.outputs)
    return [each.text for output in outputs for each in output.outputs]


def test_json_follows_the_schema_greedy_and_at_random(llm: LLM) -> None:
    """The schema is an object or a text, one is compact, and eight samples have a high temperature."""
    for form in (
        StructuredOutputsParams(json=SCHEMA, **COMPACT),
        StructuredOutputsParams(json.dumps(SCHEMA), **COMPACT),
    ):
        (text,) = texts(llm.generate("x = ", params(form), use_tqdm=False))
        assert is_allowed_by_schema(text)
        assert text == json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False)
    wild = params(StructuredOutputsParams(json=SCHEMA, **COMPACT), temperature=1.5, n=8, seed=3, max_tokens=200)
    found = texts(llm.generate("x = ", wild, use_tqdm=False))
    assert len(set(found)) > 4 and all(map(is_allowed_by_schema, found))


def test_regex_choice_grammar_and_any_object(llm: LLM) -> None:
    def answers(form: StructuredOutputsParams, count: int = 4) -> list[str]:
        return texts(llm.generate("def f():", params(form, temperature=2.0, n=count, seed=1), use_tqdm=False))

    dates = answers(StructuredOutputsParams(regex=r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])"))
    assert all(re.fullmatch(r"(19|20)[0-9]{2}-(0[1-9]|1[0-2])", date) for date in dates) and len(set(dates)) > 1
    choice = ("Paris", "Pa", "Zürich", 'a "quote" \\ and\na line')
    assert set(answers(StructuredOutputsParams(choice=choice), 24)) <= set(choice)
    ends = {257: 50.0}  # The end of text is likelier than any other token.
    short = params(StructuredOutputsParams(choice=choice[:2]), logit_bias=ends)
    assert texts(llm.generate("def f():", short, use_tqdm=False)) == ["Pa"]
    many = [f"{number} (a|b).*\n" for number in range(2500)]
    assert set(answers(StructuredOutputsParams(choice=many))) <= set(many)
    for grammar in ('start: "a" tail\ntail: "b" | "c" tail', 'root ::= "a" tail\ntail ::= "b" | "c" tail'):
        assert all(re.fullmatch("ac*b", text) for text in answers(StructuredOutputsParams(grammar=grammar)))
    (text,) = texts(
        llm.generate(
            "def f():",
            params(StructuredOutputsParams(json_object=True, **COMPACT), logit_bias={ord("}"): 100.0}),
            use_tqdm=False,
        )
    )
    assert isinstance(json.loads(text), dict)


class SlowOracle:
    """Greedy decoding by plain transformers, with each token tried on a new matcher that has read all earlier ones."""

    def __init__(self, llm: LLM, form: StructuredOutputsParams) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(DEMO_MODEL, dtype=torch.float32)
        self.grammars, self.form = grammars(llm), form
        self.eos = llm.engine.s_model.eos_token_ids

    def matcher(self, output: list[int]) -> Any:
        matcher = self.grammars.matcher(self.form)
        for token in output:
            matcher.advance(token)
        return matcher._matcher

    def generate(self, prompt: list[int]) -> list[int]:
        output: list[int] = []
        while not output or (output[-1] not in self.eos and not self.matcher(output).is_stopped()):
            with torch.no_grad():
                logits = self.model(torch.tensor([prompt + output])).logits[0, -1]
            fits = [token for token in range(len(logits)) if self.matcher(output).try_consume_tokens([token]) == 1]
            output.append(max(fits, key=lambda token: float(logits[token])))
        return output


@pytest.mark.parametrize(
    "form",
    [
        StructuredOutputsParams(json=SCHEMA, **COMPACT),
        StructuredOutputsParams(regex="[a-z]{3,9}( = |: )[0-9.]{2,6}"),
        StructuredOutputsParams(choice=["self", "selves", "path"]),
    ],
    ids=("json", "regex", "choice"),
)
def test_greedy_equals_a_slow_oracle(llm: LLM, form: StructuredOutputsParams) -> None:
    (output,) = llm.generate("def read(self, path):\n    ", params(form), use_tqdm=False)
    assert list(output.outputs[0].token_ids) == SlowOracle(llm, form).generate(output.prompt_token_ids)


@pytest.mark.slow
def test_company_changes_nothing(llm: LLM) -> None:
    """Structured and free texts, greedy and seeded, are the same alone and together, some of them preempted."""
    forms = [StructuredOutputsParams(json=SCHEMA, **COMPACT), StructuredOutputsParams(regex="[a-z ]{20,40}"), None]
    asked = [
        SamplingParams(temperature=heat, seed=5, max_tokens=60, structured_outputs=form, logprobs=2)
        for form in forms
        for heat in (0, 1.2)
    ]
    alone = [llm.generate("import os\n", each, use_tqdm=False)[0].outputs for each in asked]
    assert [output.outputs for output in llm.generate(["import os\n"] * 6, asked, use_tqdm=False)] == alone
    with LLM(**{**SETTINGS, "max_model_len": 128, "kv_cache_memory": "256KiB", "num_mini_batches": 2}) as crowded:
        outputs = crowded.generate(["import os\n"] * 12, asked * 2, use_tqdm=False)
        assert crowded.engine.scheduler.statistics.preemptions > 0
    assert [output.outputs for output in outputs] == alone * 2


@pytest.mark.thorough  # test_recovery.py tests the same with free texts.
@pytest.mark.slow
def test_a_killed_r_worker_changes_nothing() -> None:
    """One of three processes is killed when some tokens are out."""
    asked = params(StructuredOutputsParams(json=SCHEMA, **COMPACT), temperature=1.0, seed=7, n=2)
    with LLM(**SETTINGS, r_threads=1, r_workers="spawn:3") as llm:
        alone = llm.generate("x = ", asked, use_tqdm=False)[0].outputs
        for number in range(6):
            llm.engine.add_request(str(number), "x = ", asked)
        victim, found = r_workers.spawned_pids(llm)[1], {}
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                found[output.request_id] = output.outputs
                if victim and len(output.outputs[0].token_ids) == 10:
                    os.kill(victim, signal.SIGKILL)
                    victim = 0
        assert not victim and list(found.values()) == [alone] * 6
        assert_nothing_held(llm.engine)


def test_text_ends_when_it_is_complete(llm: LLM) -> None:
    """A complete text ends despite min_tokens and ignore_eos, at the length, or at an earlier stop string."""
    three = StructuredOutputsParams(regex="[0-9]{3}")
    for options in ({}, {"min_tokens": 50}, {"ignore_eos": True}, {"max_tokens": 3}):
        (output,) = llm.generate("x = ", params(three, **options), use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 3 and output.outputs[0].finish_reason == "stop", options
    (output,) = llm.generate("x = ", params(three, max_tokens=2), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate("x = ", params(three, stop=list("0123456789")), use_tqdm=False)
    assert output.outputs[0].text == "" and output.outputs[0].finish_reason == "stop"


def test_a_dead_end_is_no_complete_text(llm: LLM) -> None:
    """A part of a text that no text continues is an error, though llguidance lets it end."""
    loop = {"type": "object", "properties": {"a": {"$ref": "#/properties/a"}}, "required": ["a"]}
    for form in ({"json": loop, **COMPACT}, {"grammar": 'start: "a" x\nx: x "b"'}):
        (output,) = llm.generate("x = ", params(StructuredOutputsParams(**form)), use_tqdm=False)
        found = output.outputs[0]
        assert found.finish_reason == "error" and "leads only to itself" in str(found.stop_reason), form


def test_a_row_without_a_grammar_is_not_edited() -> None:
    """Other rows of the batch keep their scores, and a row whose grammar forbids all has failed."""

    class Only(Matcher):
        def __init__(self, *tokens: int) -> None:
            self.tokens = tokens

        def logit_bias(self, vocab_size: int) -> np.ndarray:
            bias = np.full(vocab_size, -np.inf, np.float32)
            bias[list(self.tokens)] = 0
            return bias

    greedy = SamplingParams(temperature=0)
    rows = [SamplingRow(greedy, [1], [], grammar=grammar) for grammar in (None, Only(2, 4), Only())]
    assert rows[0].plain_from == 0 and rows[1].plain_from == math.inf
    logits = torch.tensor([[0.0, 5.0, 1.0, 7.0, 2.0]]).repeat(3, 1)
    found = Sampler().sample(logits, rows)
    assert [each.token_id for each in found] == [3, 4, -1] and [each.failed for each in found] == [False, False, True]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({}, "exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"regex": "a", "choice": ["a"]}, "exactly one of .* got regex, choice"),
        ({"json_object": False}, "exactly one of"),
        ({"json": "{"}, "json must be a JSON schema"),
        ({"json": [1]}, "json must be a JSON schema"),
        ({"json": {"a": object()}}, "json must be a JSON schema"),
        ({"regex": ""}, "regex must be a regular expression"),
        ({"regex": "\ud800"}, "regex must be a regular expression"),
        ({"choice": "ab"}, "choice must be a list of non-empty strings"),
        ({"choice": ["a", ""]}, "choice must be a list of non-empty strings"),
        ({"choice": []}, "choice must be a list of non-empty strings"),
        ({"grammar": 3}, "grammar must be a grammar"),
        ({"json_object": 1}, "json_object must be True or None"),
        ({"json": {}, "disable_any_whitespace": 1}, "disable_any_whitespace must be True or False"),
    ],
)
def test_wrong_parameters_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        StructuredOutputsParams(**wrong)


def test_sampling_params_stay_hashable() -> None:
    assert hash(SamplingParams(structured_outputs=StructuredOutputsParams(json={"type": "object"})))


@pytest.mark.parametrize(
    ("form", "message"),
    [
        (StructuredOutputsParams(json={"type": 3}), "type must be a string"),
        (StructuredOutputsParams(json={"not": {}}), "Unimplemented keys"),
        (StructuredOutputsParams(regex="(a"), "unclosed group"),
        (StructuredOutputsParams(grammar="start: other"), "unknown name"),
        (StructuredOutputsParams(grammar="root ::= ("), "structured_outputs cannot be followed"),
        (StructuredOutputsParams(json={"$ref": "#"}), "leads only to itself"),
        (StructuredOutputsParams(grammar="start: start"), "leads only to itself"),
    ],
)
def test_what_cannot_be_followed_is_refused_when_it_comes(
    llm: LLM, form: StructuredOutputsParams, message: str
) -> None:
    """The error is one line, and the engine is unchanged."""
    with pytest.raises(RequestError, match=message) as caught:
        llm.engine.add_request("wrong", "x", params(form))
    assert str(caught.value).startswith("structured_outputs cannot be followed: ") and "\n" not in str(caught.value)
    assert not llm.engine.has_unfinished_requests()


def test_without_tokenizer_or_library_the_error_says_what_to_do(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    one = StructuredOutputsParams(regex="a")
    with LLM(**SETTINGS, skip_tokenizer_init=True) as bare, pytest.raises(RequestError, match="needs the tokenizer"):
        bare.generate({"prompt_token_ids": [1]}, params(one), use_tqdm=False)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"pip install 'fastdecode\[structured\]'"):
        grammars(llm).matcher(one)
