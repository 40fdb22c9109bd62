"""API requests that are kept: streams go on from their places as they would have, and files keep them."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastdecode.api.outputs import CompletionOutput, Logprob, RequestOutput
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.core.errors import RequestError
from fastdecode.journal.journal import Journal
from fastdecode.journal.records import Kept
from fastdecode.server.answer_reader import AnswerReading
from fastdecode.server.answers import AnswerForm, GrowingChoice
from fastdecode.server.kept_files import Failure, KeptFiles, KeptRequest, kept_outputs, outputs_of
from fastdecode.server.kept_records import MOST_REQUEST_BYTES, KeptRecords
from fastdecode.server.response_templates import answer_syntax
from fastdecode.server.streams import TextStreamPlace
from fastdecode.server.tool_calls import ForcedCalls

LOOK = {"type": "function", "function": {"name": "look", "parameters": {}}}
CALLED = 'a <tool_call>{"name": "look", "arguments": {"b": "é"}}</tool_call> c'
FORMS = {
    "text": (AnswerForm(False, "m", "1"), "def f(x):"),
    "chat": (AnswerForm(True, "m", "1", return_token_ids=True), "hello, é"),
    "free": (
        AnswerForm(True, "m", "1", reading=AnswerReading(syntax=answer_syntax("", "", None, "hermes"), tools=[LOOK])),
        CALLED,
    ),
    "forced": (
        AnswerForm(True, "m", "1", reading=AnswerReading(ForcedCalls(None, StructuredOutputsParams(regex="x")))),
        '[{"name":"look","parameters":{}},{"name":"look","parameters":{"a":1}}]',
    ),
}


def output(text: str) -> CompletionOutput:
    """Return a token per three characters with log-probabilities; the text shows one character late."""
    count = -(-len(text) // 3)
    ends = [min(3 * number + 2, len(text)) for number in range(count)]
    logprobs = [{number: Logprob(-0.5, 1, text[3 * number : 3 * number + 3])} for number in range(count)]
    return CompletionOutput(0, text, list(range(count)), "stop", None, logprobs, ends)


def merged(choices: list[dict[str, Any]]) -> Any:
    """Return the joined choices of chunks."""
    text = "".join(each.get("text", each.get("delta", {}).get("content") or "") for each in choices)
    calls = [call for each in choices for call in each.get("delta", {}).get("tool_calls", [])]
    ids = [token for each in choices for token in each.get("token_ids", [])]
    logprobs = [found for each in choices for found in _entries(each["logprobs"])]
    return text, calls, ids, logprobs, choices[-1]["finish_reason"]


def _entries(logprobs: dict[str, Any]) -> list[Any]:
    if "content" in logprobs:
        return list(logprobs["content"])
    return list(zip(*logprobs.values(), strict=True))


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("size", [1, 4])
def test_a_stream_goes_on_from_any_place(name: str, size: int) -> None:
    """A stream may bring any amount at once, before and after the place."""
    form, text = FORMS[name]
    whole = output(text)
    seen = GrowingChoice(form, 0).news(whole)
    assert seen
    count = len(whole.tokens)
    for end in range(count + 1):
        first = TextStreamPlace(form, 1)
        first.choices[0].begun = True
        sizes = [*range(size, end, size), end]
        told = [first.choices[0].news(whole.after(each)) for each in sizes]
        second = TextStreamPlace(form, 1, first.name)
        assert second.name == first.name
        told += [second.choices[0].news(whole.after(each)) for each in range(0, count, 2)]
        told.append(second.choices[0].news(whole))
        assert merged([each for each in told if each]) == merged([seen]), first.name
        assert second.name == f"{count}." and TextStreamPlace(form, 1, second.name).choices[0].news(whole) is None


def test_places_of_several_choices() -> None:
    form, text = FORMS["text"]
    place = TextStreamPlace(form, 3)
    assert place.name == "-,-,-"
    place.choices[0].begun = place.choices[2].begun = True
    place.choices[2].news(output(text))
    assert place.name == "0,-,3." == TextStreamPlace(form, 3, "0,-,3.").name
    place.told_usage = True
    assert TextStreamPlace(form, 3, place.name).told_usage
    for wrong in ("", "1", "1,2,x", "1,2,-.", "1,2,3,4", "-1,2,3", "1,2,99999999999"):
        with pytest.raises(RequestError, match="is no place in a stream of 3 choices"):
            TextStreamPlace(form, 3, wrong)


def test_files_are_those_of_one_server(tmp_path: Path) -> None:
    """The files belong to the server that came last; an earlier one that wakes up changes nothing."""
    kept = KeptRequest("a", "/v1/completions", {"prompt": "x"}, 7, [([1, 2], "x")])
    first = KeptFiles(str(tmp_path))
    num_bytes = first.write(kept)
    second = KeptFiles(str(tmp_path))
    assert second.read("a") == kept and not kept.ended
    for change in (lambda: first.write(kept), lambda: first.write(KeptRequest("b", "", {}, 0, []))):
        with pytest.raises(FileNotFoundError):
            change()
    first.delete("a")
    assert [(name, size) for name, _, size in second.ages()] == [("a", num_bytes)]
    kept.outputs = kept_outputs([RequestOutput("a-0", "x", [1, 2], [output("some text")], True)])
    second.write(kept)
    found = second.read("a")
    assert found and found.ended and outputs_of(found)[0].outputs == [output("some text")]
    assert outputs_of(found)[0].outputs[0].text_ends == output("some text").text_ends
    (tmp_path / "requests-2" / "a.request").write_bytes(json.dumps("no").encode())
    (tmp_path / "requests-2" / "b.new").write_bytes(b"half")
    assert second.read("a") is None and second.read("b") is None and len(second.ages()) == 1
    second.delete("a")
    second.delete("a")
    failed = KeptRequest("c", "/v1/responses", {}, 0, [], failure=Failure(409, "x", "cancelled"))
    second.write(failed)
    assert KeptFiles(str(tmp_path)).read("c") == failed and failed.ended


class Noted(Journal):
    """A journal that keeps its bytes in memory."""

    def keep(self, name: str, data: bytes) -> None:
        self.kept[name] = Kept(name, time.time(), data)

    def forget(self, name: str) -> None:
        self.kept.pop(name, None)


def test_a_journal_keeps_requests() -> None:
    """A journal keeps requests as files do, except one that has no room there."""
    kept = KeptRequest("a", "/v1/completions", {"prompt": "x"}, 7, [([1, 2], "x")])
    with ThreadPoolExecutor(1) as thread:
        store = KeptRecords(Noted(), thread)
        num_bytes = store.write(kept)
        assert store.read("a") == kept and store.read("b") is None
        assert [(name, size) for name, _, size in store.ages()] == [("a", num_bytes)]
        with pytest.raises(OSError, match="bytes are more than R-workers keep of one request, 8,388,608"):
            store.write(KeptRequest("b", "", {"prompt": "x" * MOST_REQUEST_BYTES}, 0, []))
        store.delete("a")
        store.delete("a")
        assert store.read("a") is None and not store.ages()
