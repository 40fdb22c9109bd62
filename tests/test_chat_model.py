"""A real chat model (`make model`) gives transformers' tokens with any R-workers, cache and form of its files."""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from helpers import r_workers
from helpers.engine_checks import assert_nothing_held
from helpers.examples import SEES_ALL
from transformers import AutoModelForCausalLM, AutoTokenizer

from fastdecode import LLM, SamplingParams, StructuredOutputsParams
from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.cli.bench_perplexity import measure_perplexity

# The first test that asks for the model waits until it is downloaded and converted.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).resolve().parents[1] / "scripts" / "get_model.py"
UNREACHABLE = 69
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SETTINGS = {"dtype": "float32", "device": "cpu", "max_model_len": 1024, "kv_cache_memory": "256MiB"}
SETTINGS |= {"s_threads": 1, "r_threads": 1}  # Tests run side by side on the same cores.
QUESTIONS = [
    "What is the capital of France?",
    "What is 2 + 2?",
    "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.",
    "Name three primary colours.",
    "Why is the sky blue?",
    "Write a haiku about autumn.",
    "What does a compiler do?",
    "List the planets of the solar system.",
    "How do I boil an egg?",
    "Explain recursion to a child.",
    "What is the boiling point of water in Fahrenheit?",
    "Give me a Python function that reverses a string.",
    "Summarise in one sentence: The cat sat on the mat because it was warm and the floor was cold.",
    "Is a tomato a fruit?",
    "Who was the first person on the Moon?",
    "What is the opposite of 'generous'?",
    "Tell me a joke about a bear.",
    "How many days are in a leap year?",
    "Correct the grammar: 'She don't like apples.'",
]
ASKED = QUESTIONS if SEES_ALL else QUESTIONS[:8]
CHATS = [[{"role": "user", "content": question}] for question in ASKED]


@pytest.fixture(scope="module")
def folder() -> str:
    """Return the model's folder; the model is downloaded and converted at most once."""
    done = subprocess.run([sys.executable, str(SCRIPT)], capture_output=True, text=True, check=False)
    if done.returncode == UNREACHABLE:
        pytest.skip(done.stderr.strip().splitlines()[-1])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    """Return transformers' greedy answers, computed in one batch, each with its end-of-text token."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in CHATS]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=GREEDY.max_tokens)
    answers = tokens[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(2) + 1] if 2 in row else row for row in answers]


@pytest.fixture(scope="module")
def llm(folder: str) -> Iterator[LLM]:
    """Yield an LLM with one R-worker."""
    with LLM(folder, **SETTINGS) as llm:
        yield llm
        assert_nothing_held(llm.engine)


def token_ids(llm: LLM) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.chat(CHATS, GREEDY, use_tqdm=False)]


def test_answers_are_those_of_transformers(llm: LLM, expected: list[list[int]]) -> None:
    """The answers equal transformers', and the first is the one that the README shows."""
    assert token_ids(llm) == expected
    assert "Paris" in llm.get_tokenizer().decode(expected[0]) and len({tuple(row) for row in expected}) == len(CHATS)


@pytest.mark.thorough  # test_exactness.py tests the same with its own models.
def test_two_r_workers_in_two_mini_batches_change_nothing(folder: str, expected: list[list[int]]) -> None:
    with LLM(folder, **{**SETTINGS, "s_threads": 2}, r_workers="inproc:2", num_mini_batches=2) as llm:
        assert token_ids(llm) == expected


@pytest.mark.thorough  # test_recovery.py tests the same with a smaller model.
def test_one_of_three_r_workers_is_killed(folder: str, expected: list[list[int]]) -> None:
    """``kill -9`` ends one R-worker in the middle of the answers."""
    with LLM(folder, **SETTINGS, r_workers="spawn:3") as llm:
        for number, chat in enumerate(CHATS):
            ids = llm.engine.s_model.tokenizer.encode_chat(chat)
            llm.engine.add_request(str(number), {"prompt_token_ids": ids}, GREEDY)
        victim, found = r_workers.spawned_pids(llm)[2], {}
        while llm.engine.has_unfinished_requests():
            for output in llm.engine.step():
                found[int(output.request_id)] = list(output.outputs[0].token_ids)
            if victim and sum(map(len, found.values())) > 80:
                os.kill(victim, signal.SIGKILL)
                victim = 0
        assert not victim and [found[number] for number in range(len(CHATS))] == expected
        assert_nothing_held(llm.engine)


@pytest.mark.thorough
def test_every_cache_predicts_a_text_as_well(llm: LLM, folder: str) -> None:
    """16-bit and int8 caches predict a text within 0.5 % of float32, and int4 within 5 %.

    ``make test`` leaves out 16 bits, which round less than int8.
    """
    sixteen_bits = ("bfloat16", "float16") if SEES_ALL else ()
    text = (DEMO_MODEL / "heldout.txt").read_text(encoding="utf-8")[4000:4900]
    found = {"float32": measure_perplexity(llm.engine, text, 1000).perplexity}
    for dtype in (*sixteen_bits, "int8", "int4"):
        with LLM(folder, **SETTINGS, kv_cache_dtype=dtype) as other:
            found[dtype] = measure_perplexity(other.engine, text, 1000).perplexity
    for dtype in (*sixteen_bits, "int8"):
        assert found[dtype] == pytest.approx(found["float32"], rel=5e-3), found
    assert found["int8"] == pytest.approx(found.get("bfloat16", found["float32"]), rel=5e-3), found
    assert found["int4"] == pytest.approx(found["float32"], rel=5e-2), found


@pytest.mark.thorough  # test_structured_outputs.py tests the same with the demo model.
def test_answers_follow_a_schema_or_a_choice(llm: LLM) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string"}, "inhabitants": {"type": "integer", "maximum": 99999999}},
        "required": ["city", "inhabitants"],
        "additionalProperties": False,
    }
    form = StructuredOutputsParams(json=schema, disable_any_whitespace=True)
    asked = [SamplingParams(temperature=0, max_tokens=40, structured_outputs=form)]
    cities = StructuredOutputsParams(choice=[f"The capital of France is {name}." for name in ("Berlin", "Paris")])
    asked += [SamplingParams(temperature=0, structured_outputs=cities)]
    question = [{"role": "user", "content": "What is the capital of France, and how many people live there? Use JSON."}]
    city, choice = llm.chat([question, CHATS[0]], asked, use_tqdm=False)
    value = json.loads(city.outputs[0].text)
    assert list(value) == ["city", "inhabitants"] and "Paris" in value["city"] and isinstance(value["inhabitants"], int)
    assert choice.outputs[0].text == "The capital of France is Paris."


@pytest.mark.thorough
def test_chats_of_a_batch_file_take_the_template(llm: LLM, folder: str, tmp_path: Path) -> None:
    rows = [
        {"custom_id": question, "method": "POST", "url": "/v1/chat/completions"}
        | {"body": {"messages": chat, "max_tokens": 12, "temperature": 0}}
        for question, chat in zip(QUESTIONS[:2], CHATS[:2], strict=True)
    ]
    asked, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows))
    flags = [flag for name, value in SETTINGS.items() for flag in (f"--{name.replace('_', '-')}", str(value))]
    assert main(["run-batch", "-i", str(asked), "-o", str(out), "--model", folder, *flags]) == 0
    answers = {line["custom_id"]: line["response"]["body"] for line in map(json.loads, out.read_text().splitlines())}
    for question, output in zip(QUESTIONS[:2], llm.chat(CHATS[:2], GREEDY, use_tqdm=False), strict=True):
        assert answers[question]["choices"][0]["message"]["content"] == output.outputs[0].text
        assert answers[question]["usage"]["prompt_tokens"] == len(output.prompt_token_ids)


@pytest.mark.thorough
def test_an_answer_rests_on_the_document_that_says_it(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The example finds the document among twenty, and ``--show-sources`` prints a line per token."""
    example = runpy.run_path(str(SCRIPT.parents[1] / "examples" / "which_document.py"))
    example["main"](folder, str(tmp_path / "which.png"))
    printed = capsys.readouterr().out
    assert "Marta Lindqvist" in printed.split("\n\n")[0]
    first = printed.split("above habit  document\n")[1].splitlines()[0]
    assert "Document 9: Indigo is a dye works" in first
    assert (tmp_path / "which.png").stat().st_size > 20_000
    flags = ["--dtype", "float32", "--device", "cpu", "--max-tokens", "3", "--temperature", "0", "--show-sources", "2"]
    flags += ["--kv-cache-memory", "64MiB", "--max-model-len", "256", "--chat", "Say yes."]
    assert main(["generate", "--model", folder, *flags]) == 0
    lines = capsys.readouterr().out.splitlines()[-3:]
    assert all(re.search(r"\d+% \d+-\d+ '.*  +\d+% ", line) for line in lines), lines
