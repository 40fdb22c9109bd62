"""Tool calls and thoughts of model families, read back from each chat template's text, whole and in pieces."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from helpers.chat_families import FAMILIES, Family
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.utils.chat_template_utils import render_jinja_template

from fastdecode.api.config import EngineConfig
from fastdecode.api.conversations import with_known_thoughts
from fastdecode.api.text import TextStream
from fastdecode.core.errors import ConfigError
from fastdecode.server.answer_reader import AnswerReading, Thought
from fastdecode.server.call_parts import CallPart
from fastdecode.server.chat_messages import ChatWriter
from fastdecode.server.prompt_reader import PromptTokens
from fastdecode.server.protocol import ChatRequest
from fastdecode.server.readings import Readings
from fastdecode.server.response_templates import AnswerSyntax, answer_syntax
from fastdecode.server.server_settings import parser_names
from fastdecode.sworker.model.tokenizer import HFTokenizer
from fastdecode.sworker.sampling.answer_parser import AnswerCutter

NUM_SPLITS = 500

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {
        "place": {"type": "string"},
        "days": {"$ref": "#/$defs/count"},
        "exact": {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
        "more": {"type": "object"},
    },
    "$defs": {"count": {"type": "integer"}},
}
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "get_weather", "parameters": PLACE}},
    {"type": "function", "function": {"name": "stop", "parameters": {"type": "object", "properties": {}}}},
]
USER = {"role": "user", "content": "Say <think> and <tool_call>{} please."}
ARGUMENTS = {"place": "Zürich {7}", "days": 7, "exact": True, "more": {"a": [1, None, "x, y"]}}
LOOKS_LIKE_A_NUMBER = {"place": "7"}


def message(family: Family, thinks: bool, says: str, calls: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"role": "assistant", "content": says}
    if thinks:
        found["reasoning_content"] = "They want the weather.\n\nSo I look."
    if calls:
        found["tool_calls"] = [
            {
                "id": family.ids.format(name=name, index=index),
                "type": "function",
                "function": {"name": name, "arguments": arguments},
            }
            for index, (name, arguments) in enumerate(calls)
        ]
    return found


def cases(family: Family) -> list[dict[str, Any]]:
    several = [("get_weather", ARGUMENTS), ("stop", {})]
    lists: list[list[tuple[str, Any]]] = [[], several[: family.most_calls], [("get_weather", LOOKS_LIKE_A_NUMBER)]]
    found = []
    for thinks, says, calls in itertools.product((False, True), ("", "I look.\n\n  Now:", "Hello <b>"), lists):
        if (says and calls and not family.text_beside_calls) or not (says or calls) or (thinks and not family.thinks):
            continue  # The family's template does not write such a message.
        found.append(message(family, thinks, says, calls))
    return found


def rendered(family: Family, given: dict[str, Any]) -> tuple[str, str]:
    """Return the prompt, and the text that the model writes after it, without its end."""
    kwargs = family.kwargs[0 if "reasoning_content" in given else 1]

    def render(messages: list[Any], **more: Any) -> str:
        (texts, _) = render_jinja_template([messages], chat_template=family.template, tools=TOOLS, **kwargs, **more)
        return str(texts[0])

    prompt, whole = render([USER], add_generation_prompt=True), render([USER, given])
    if not whole.startswith(prompt):  # The template opens a thought, but the message has none.
        prompt = render([USER], add_generation_prompt=False)
        cut = next(len(prompt) + len(mark) for mark in (MINIMAX, IM) if whole.startswith(prompt + mark))
        prompt, whole = whole[:cut], whole
    answer = whole[len(prompt) :]
    end = next(end for end in family.ends if answer.endswith(end))
    return prompt, answer.removesuffix(end)


MINIMAX, IM = "]~b]ai\n", "<|im_start|>assistant\n"


def syntax_of(family: Family, by_name: bool = False) -> AnswerSyntax:
    header = render_jinja_template([[USER]], chat_template=family.template, add_generation_prompt=True)[0][0]
    header = header[len(render_jinja_template([[USER]], chat_template=family.template)[0][0]) :]
    found = answer_syntax("" if by_name else family.template, header, None, *(family.parsers if by_name else ()))
    assert found
    return found


def reading_of(syntax: AnswerSyntax, prompt: str, **more: Any) -> AnswerReading:
    return AnswerReading(syntax=syntax, tools=TOOLS, prompt=prompt, **more)


def read(reading: AnswerReading, text: str, cuts: Sequence[int] = ()) -> dict[str, Any]:
    """Return what a client joins the parts of the message to."""
    writer = ChatWriter(reading, "answer")
    found: dict[str, Any] = {"content": "", "reasoning_content": "", "tool_calls": []}
    for end, finished in [*((cut, False) for cut in cuts), (len(text), True)]:
        delta = writer.delta(text[:end], finished) or {}
        for name in ("content", "reasoning_content"):
            found[name] += delta.get(name) or ""
        found["tool_calls"] += delta.get("tool_calls", [])
    return found


@pytest.mark.parametrize("by_name", [False, True], ids=("by_template", "by_name"))
@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_is_read_back(name: str, by_name: bool) -> None:
    """Thoughts, text, names, arguments of all types, and ids that the template accepts again are read back."""
    family = FAMILIES[name]
    syntax = syntax_of(family, by_name)
    for given in cases(family):
        if syntax.starts_with and "reasoning_content" not in given:
            continue  # Such a parser takes any beginning for a thought.
        prompt, text = rendered(family, given)
        found = read(reading_of(syntax, prompt), text)
        assert found["content"] == given["content"], text
        assert found["reasoning_content"] == given.get("reasoning_content", ""), text
        calls = [(each["function"]["name"], json.loads(each["function"]["arguments"])) for each in found["tool_calls"]]
        assert calls == [
            (each["function"]["name"], each["function"]["arguments"]) for each in given.get("tool_calls", ())
        ], text
        whole = ChatWriter(reading_of(syntax, prompt), "answer").message(text)
        assert [{**each, "index": i} for i, each in enumerate(whole.get("tool_calls", ()))] == found["tool_calls"]
        for each in whole.get("tool_calls", ()):
            each["function"]["arguments"] = json.loads(each["function"]["arguments"])
        assert (whole["content"] or "") == found["content"]
        again = rendered(family, {"role": "assistant", **whole, "content": whole["content"] or ""})[1]
        if name == "kimi_k2" or not calls:
            assert again == text


@pytest.mark.parametrize("name", FAMILIES)
def test_a_stream_is_read_as_the_whole_however_it_is_split(name: str) -> None:
    """The pieces of a stream do not matter, nor do they for a beginning, from which streams are read again."""
    family, draw = FAMILIES[name], random.Random(name)
    syntax = syntax_of(family)
    texts = [rendered(family, given) for given in cases(family)]
    texts += [(prompt, text[: len(text) * 2 // 3]) for prompt, text in texts[-2:]]
    texts += [(prompt, text.replace("get_weather", "no_such_tool").replace("}", "")) for prompt, text in texts[-4:-2]]
    wholes = {each: read(reading_of(syntax, each[0]), each[1]) for each in texts}
    for prompt, text in (draw.choice(texts) for _ in range(NUM_SPLITS)):
        cuts = sorted(draw.sample(range(len(text) + 1), draw.randint(1, min(9, len(text)))))
        assert read(reading_of(syntax, prompt), text, cuts) == wholes[prompt, text], (text, cuts)
    prompt, text = texts[-1]
    by_letter = reading_of(syntax, prompt).reader("answer")
    seen: list[Any] = []
    for end in range(len(text)):
        seen += by_letter.read(text[:end], False)
        assert joined(seen) == joined(reading_of(syntax, prompt).reader("answer").read(text[:end], False)), text[:end]


def joined(pieces: Sequence[Any]) -> tuple[str, str, list[CallPart]]:
    text = "".join(each for each in pieces if isinstance(each, str))
    thoughts = "".join(each.text for each in pieces if isinstance(each, Thought))
    return text, thoughts, [each for each in pieces if isinstance(each, CallPart)]


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ('{"place": "\\ud83d b"}', {"place": "\ufffd b"}),
        ('{"\\udc00": 1}', {"\ufffd": 1}),
        ('{"place": "\\ud83d\\ude00"}', {"place": "😀"}),
        ('{"days": NaN}', None),
        ('{"days": -Infinity}', None),
        ('{"days": 1e999}', None),
        ('{"days": 123456789012345678901234567890}', {"days": 123456789012345678901234567890}),
        ('{"days": 1, "days": 2}', {"days": 2}),
        ('{"a": ' + "9" * 5000 + "}", None),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", None),
        ('{"more": {"a": [[[[1]]]]}}', {"more": {"a": [[[[1]]]]}}),
        ('"{\\"place\\": \\"x\\"}"', {"place": "x"}),
        ("[1]", None),
        ("7", None),
        ("null", None),
        ('{"place": "x"', None),
        ('{"place": "a\u0000b"}', None),
    ],
)
@pytest.mark.parametrize("name", ["qwen3", "deepseek_v31", "kimi_k2", "gpt_oss", "mistral", "mistral_listed", "llama3"])
def test_arguments_are_json_for_any_parser_or_text(name: str, arguments: str, wanted: Any) -> None:
    family = FAMILIES[name]
    given = message(family, False, "", [("get_weather", {"place": "HERE"})])
    prompt, text = rendered(family, given)
    text = text.replace('{"place": "HERE"}', arguments)
    found = read(reading_of(syntax_of(family), prompt), text, range(0, len(text), 7) if len(text) < 10_000 else ())
    if wanted is None:
        assert not found["tool_calls"] and arguments in found["content"]
    else:
        (call,) = found["tool_calls"]
        assert json.loads(call["function"]["arguments"].encode()) == wanted and not found["content"]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_of_no_offered_function_stay_text(name: str) -> None:
    family = FAMILIES[name]
    given = message(family, False, "", [("get_weather", {"place": "x"})])
    prompt, text = rendered(family, given)
    syntax = syntax_of(family)
    other = AnswerReading(syntax=syntax, tools=[{"type": "function", "function": {"name": "other"}}], prompt=prompt)
    found, none = read(other, text), read(AnswerReading(syntax=syntax, prompt=prompt), text, range(len(text)))
    assert not found["tool_calls"] and "get_weather" in found["content"]
    assert not none["tool_calls"] and "get_weather" in none["content"]
    if name != "gpt_oss":  # The other families' further delimiters are dropped.
        assert found["content"].strip() == none["content"].strip() == text[text.index(none["content"].strip()) :]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.most_calls > 1])
def test_one_call_where_several_are_not_wanted(name: str) -> None:
    family = FAMILIES[name]
    prompt, text = rendered(family, message(family, False, "", [("stop", {}), ("get_weather", {"place": "x"})]))
    found = read(reading_of(syntax_of(family), prompt, parallel=False), text, range(len(text)))
    assert [each["function"]["name"] for each in found["tool_calls"]] == ["stop"] and not found["content"]


def test_a_thought_that_the_prompt_opens_and_one_that_has_no_end() -> None:
    syntax = syntax_of(FAMILIES["qwen3_coder"])
    prompt = "<|im_start|>user\n<think>x</think><|im_end|>\n<|im_start|>assistant\n<think>\n"
    assert read(reading_of(syntax, prompt), "so\n\n</think>\n\nYes")["reasoning_content"] == "so"
    found = read(reading_of(syntax, prompt), "so it", [1, 2, 3])
    assert (found["content"], found["reasoning_content"]) == ("", "so it")
    assert read(reading_of(syntax, prompt, is_json=True), '{"a": 1}')["content"] == '{"a": 1}'


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [("so</think>Yes", "so", "Yes"), ("<think>so</think>Yes", "so", "Yes"), ("so", "so", ""), ("<thin", "<thin", "")],
)
def test_a_parser_whose_models_leave_out_the_first_mark(text: str, thoughts: str, content: str) -> None:
    syntax = answer_syntax("", "", None, None, "deepseek_r1")
    assert syntax
    for cuts in ((), range(len(text))):
        found = read(reading_of(syntax, ""), text, cuts)
        assert (found["reasoning_content"], found["content"]) == (thoughts, content)


def test_the_tokenizer_s_own_template_goes_first() -> None:
    """A template that transformers adds goes first; it has anchors by pattern, implicit ends and other field names."""
    own = {
        "start_anchor_pattern": r"<bot>\s",
        "fields": {
            "thinking": {"open": "((", "close": "))"},
            "tool_calls": {
                "open_pattern": r"CALL (?P<name>\w+):", "close": ";", "content": "kv-lines",
                "content_args": {"line_sep": ",", "kv_sep": "="}, "repeats": True,
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
            "content": {"close": "<end>"},
        },
    }  # fmt: skip
    syntax = answer_syntax(FAMILIES["qwen3"].template, "", own)
    assert syntax
    text = "a))Look: CALL get_weather: place=7, days=7;CALL stop:;<end>"
    for cuts in ((), range(len(text))):
        found = read(reading_of(syntax, "<bot> (("), text, cuts)
        assert (found["reasoning_content"], found["content"]) == ("a", "Look: ")
        calls = [json.loads(each["function"]["arguments"]) for each in found["tool_calls"]]
        assert calls == [{"place": "7", "days": 7}, {}]
    with pytest.raises(ConfigError, match="response_template: Field 'x'"):
        answer_syntax("", "", {"start_anchor": "a", "fields": {"x": {"wrong": 1}}})


def test_names_of_parsers_are_vllm_s() -> None:
    for kind, name in (("tools", "hermes"), ("reasoning", "deepseek_r1")):
        assert name in parser_names(kind)
    for names in (("no_such", None), (None, "no_such")):
        with pytest.raises(ConfigError, match=r"must be one of .*got 'no_such'"):
            answer_syntax("", "", None, *names)


def test_a_prompt_without_the_beginning_of_an_answer_opens_nothing() -> None:
    syntax = syntax_of(FAMILIES["qwen3"])
    assert not AnswerCutter(syntax.with_calls, "<think> of it").is_open


def test_thoughts_that_clients_send_back_have_the_name_that_a_template_reads() -> None:
    said: list[Any] = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "a", "reasoning": "so"}]
    for template, name in (
        ("{{ m.reasoning_content }}", "reasoning_content"),
        ("{% if 'thinking' in m %}{{ m.thinking }}{% endif %}", "thinking"),
        ("{{ m['reasoning'] }}", "reasoning"),
        ("{% if thinking %}{% endif %}", "reasoning"),
    ):
        assert with_known_thoughts(said, template) == [said[0], {"role": "assistant", "content": "a", name: "so"}]


def test_special_tokens_that_delimit_calls_stay_in_the_text(tmp_path: Path) -> None:
    """Tokens that delimit calls stay in the text and others do not; without tools the text hides them all."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({piece: number for number, piece in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|tool_call_start|>", "<|tool_call_end|>"]
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=special)
    fast.chat_template = FAMILIES["lfm2"].template
    fast.save_pretrained(tmp_path)
    tokenizer = HFTokenizer(EngineConfig(tokenizer=str(tmp_path)))
    readings = Readings(tokenizer)
    ids = tokenizer.encode("<|im_start|>ok<|tool_call_start|>[stop()]<|tool_call_end|><|im_end|>")
    user = [{"role": "user", "content": "hi"}]
    prompt = PromptTokens(tokenizer.encode_chat(user))
    for tools, wanted in ((TOOLS, "ok<|tool_call_start|>[stop()]<|tool_call_end|>"), (None, "ok[stop()]")):
        request = ChatRequest(messages=user, tools=tools)
        shown = readings.sampling_params(request, {}).shown_special_token_ids
        assert shown == ((258, 259) if tools else ())
        text = TextStream(tokenizer.backend, (), not shown, hidden=tokenizer.special_token_ids.difference(shown or ()))
        for token in ids:
            text.push(token)
        assert text.text == wanted
        found = read(readings.of(request, [prompt]), text.text)
        assert [each["function"]["name"] for each in found["tool_calls"]] == (["stop"] if tools else [])


@pytest.mark.parametrize(
    "parameters",
    [
        None,
        [],
        {"properties": 3},
        {"properties": {"place": 3}},
        {"properties": {"place": {"type": 3, "enum": 4, "anyOf": True, "const": {}}}},
        {"properties": {"place": {"$ref": "#/properties/place"}}},
        {"properties": {"place": {"$ref": "#/nowhere/0"}}, "$ref": 5, "$defs": [1]},
    ],
)
def test_schemas_that_say_nothing_leave_arguments_as_text(parameters: Any) -> None:
    family = FAMILIES["qwen3_coder"]
    prompt, text = rendered(family, message(family, False, "", [("get_weather", {"place": "7"})]))
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": parameters}}]
    (call,) = read(AnswerReading(syntax=syntax_of(family), tools=tools, prompt=prompt), text)["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"place": "7"}
