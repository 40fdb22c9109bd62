"""``fastdecode run-batch``: answers, errors, and a run that goes on where an earlier one was interrupted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from helpers import mpi_jobs, r_workers
from helpers.processes import PATIENCE_SECONDS, children_of

from fastdecode.api.outputs import CompletionOutput, Logprob, RequestOutput
from fastdecode.api.sampling_params import SamplingParams
from fastdecode.batch.lines import BatchLine, answer, read_request
from fastdecode.cli.main import main
from fastdecode.core.errors import ConfigError, RequestError
from fastdecode.server.protocol import CHAT, COMPLETIONS, sampling_params
from fastdecode.sworker.model.tokenizer import HFTokenizer

pytestmark = pytest.mark.slow

FLAGS = ["--max-model-len", "256", "--max-num-seqs", "2", "--kv-cache-memory", "64MiB", "--device", "cpu"]


def line(custom_id: str, url: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


REQUESTS = [
    line(f"r{number}", prompt=f"def f{number}(x):\n", max_tokens=12 + 4 * number, temperature=0, ignore_eos=True)
    for number in range(6)
]


def write(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines))
    return str(path)


def answers(path: Path) -> dict[str, dict[str, Any]]:
    """Return the answers by custom_id, each of which must be there once."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in lines}) == len(lines)
    return {each["custom_id"]: each["response"] for each in lines}


def texts(path: Path) -> dict[str, str]:
    return {name: response["body"]["choices"][0]["text"] for name, response in answers(path).items()}


def run_batch(asked: str, out: Path) -> list[str]:
    return [r_workers.FASTDECODE, "run-batch", "-i", asked, "-o", str(out), *FLAGS]


def wait_for_answers(out: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not out.exists() or out.read_bytes().count(b"\n") < 2:
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the answers to REQUESTS of a run without interruption."""
    folder = tmp_path_factory.mktemp("whole")
    out = folder / "whole.jsonl"
    assert main(["run-batch", "-i", write(folder / "in.jsonl", REQUESTS), "-o", str(out), *FLAGS]) == 0
    assert len(texts(out)) == 6 and len(set(texts(out).values())) == 6
    return texts(out)


def test_a_job_that_lost_an_mpi_rank_goes_on_where_it_was(tmp_path: Path, whole: dict[str, str]) -> None:
    """The job ends by an R-worker's death under MPI, then within a line; each request is answered once."""
    asked, out = write(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    s_worker = [each for each in run_batch(asked, out) if each not in ("--kv-cache-memory", "64MiB")]
    command = mpi_jobs.command((1, [*s_worker, "--r-workers", "mpi"]), (1, mpi_jobs.R_WORKER))
    job = subprocess.Popen(
        command, env=mpi_jobs.environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    wait_for_answers(out, job)
    found = subprocess.run(["pgrep", "-P", str(job.pid), "-f", "r-worker"], capture_output=True, text=True, check=False)
    os.kill(int(found.stdout.split()[0]), signal.SIGKILL)
    assert job.wait(PATIENCE_SECONDS) != 0
    job.communicate()
    assert 2 <= len(answers(out)) < 6
    with out.open("ab") as file:
        file.write(b'{"id": "batch_req-1", "custom_id": "r5", "resp')
    assert main(["run-batch", "-i", asked, "-o", str(out), *FLAGS]) == 0
    assert texts(out) == whole


def test_a_job_that_lost_a_rank_goes_on_where_it_was(
    tmp_path: Path, whole: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    """The job ends by itself and names the lost rank; a run of one rank answers what two have left."""
    asked, out = write(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    killed: list[int] = []

    def kill() -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while time.monotonic() < deadline and not killed:
            if out.exists() and b"\n" in out.read_bytes():
                killed.append(children_of(os.getpid(), "tensor_parallel.process")[0])
                os.kill(killed[0], signal.SIGKILL)
            time.sleep(0.002)

    killer = threading.Thread(target=kill)
    killer.start()
    assert main(["run-batch", "-i", asked, "-o", str(out), *FLAGS, "--tensor-parallel-size", "2"]) == 1
    killer.join()
    assert killed
    assert "rank 1 (process" in capsys.readouterr().err
    assert 1 <= len(answers(out)) < 6
    assert main(["run-batch", "-i", asked, "-o", str(out), *FLAGS]) == 0
    assert texts(out) == whole


def test_requests_that_cannot_run_are_answered_with_the_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other requests run, and afterwards nothing is left to do."""
    asked = [
        line("good", prompt="x = ", max_tokens=3, n=2, seed=1, user="me", logit_bias={"65": 1}),
        line("ids", prompt=[1, 2, 3], max_tokens=2),
        line("long", prompt="x" * 1000),
        line("chat", CHAT, messages=[{"role": "user", "content": "hi"}]),
        line("unknown", prompt="x", unheard_of=2),
        line("refused", prompt="x", best_of=2),
        line("no room", prompt="x", max_tokens=255),
        line("wrong", prompt="x", temperature=-1),
        line("stream", prompt="x", stream=True),
        line("bias", prompt="x", logit_bias={"²": 1}),
        line("half \ud800", prompt="hi \ud800"),
        line("nothing"),
    ]
    out = tmp_path / "out.jsonl"
    arguments = ["run-batch", "-i", write(tmp_path / "in.jsonl", asked), "-o", str(out), *FLAGS]
    assert main(arguments) == 1
    found = answers(out)
    good = found["good"]["body"]
    assert found["good"]["status_code"] == 200 and [choice["index"] for choice in good["choices"]] == [0, 1]
    usage = {"prompt_tokens": 5, "completion_tokens": 6, "total_tokens": 11}
    assert good["usage"] == usage | {"prompt_tokens_details": {"cached_tokens": 0}}
    assert found["ids"]["body"]["choices"][0]["finish_reason"] == "length"
    for name, message in {
        "long": "prompt has 1001 tokens, and max_model_len is 256",
        "chat": "the model's tokenizer has no chat template",
        "unknown": "unheard_of is not understood; known are add_special_tokens",
        "refused": "best_of is not supported: give n",
        "no room": "max_tokens is too large: 255; max_model_len is 256 tokens, and the prompt has 2",
        "wrong": "temperature",
        "stream": "a batch is not streamed",
        "bias": "logit_bias",
        "half \ud800": "half of a surrogate pair at position 3",
        "nothing": "prompt is missing",
    }.items():
        assert found[name]["status_code"] == 400 and message in found[name]["body"]["error"]["message"]
    assert main(arguments) == 1
    assert "12 of 12 requests are answered, 10 of them with an error" in capsys.readouterr().out


def test_failures_are_asked_again_when_told_so(tmp_path: Path) -> None:
    """The good answer stays, and a failed name can be asked again with another request."""
    out, asked = tmp_path / "out.jsonl", [line("good", prompt="x = ", max_tokens=3), line("bad", prompt="x", top_p=2)]
    arguments = ["run-batch", "-i", write(tmp_path / "in.jsonl", asked), "-o", str(out), *FLAGS]
    assert main(arguments) == 1 == main(arguments)
    good = answers(out)["good"]
    asked[1] = line("bad", prompt="x", max_tokens=2)
    write(tmp_path / "in.jsonl", asked)
    assert main([*arguments, "--retry-failed"]) == 0
    assert answers(out)["good"] == good and answers(out)["bad"]["status_code"] == 200
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_lines_that_are_no_request_are_reported_and_the_others_answered(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    good = [json.dumps(line(name, prompt="x", max_tokens=2)) for name in "ab"]
    kinds = [json.dumps(line("c", "/v1/embeddings")), json.dumps(line("d") | {"body": []})]
    lines = [good[0].encode(), b"{", b'{"custom_id": 3}', good[0].encode(), b"\xff", *(each.encode() for each in kinds)]
    (tmp_path / "in.jsonl").write_bytes(b"\n".join([*lines, b"", good[1].encode()]))
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(out), *FLAGS]) == 1
    found, error = answers(out), capfd.readouterr().err
    assert {name: each["status_code"] for name, each in found.items()} == {"a": 200, "b": 200, "c": 400, "d": 400}
    assert (
        "must POST to /v1/completions, /v1/chat/completions or /v1/responses" in found["c"]["body"]["error"]["message"]
    )
    assert "body must be an object" in found["d"]["body"]["error"]["message"]
    for number, words in (
        (2, "not valid JSON"),
        (3, "with a custom_id"),
        (4, "'a' was asked before"),
        (5, "not valid"),
    ):
        assert f"line {number}: " in error and words in error


def test_a_list_of_prompts_has_their_choices_in_order(tmp_path: Path) -> None:
    """Texts or token ids are accepted with log-probabilities; a list with one that cannot run is refused whole."""
    one, two = "def f(x):", "import os"
    greedy = {"max_tokens": 4, "temperature": 0}
    asked = [line("both", prompt=[one, two], **greedy), line("one", prompt=one, **greedy, logprobs=2)]
    asked += [line("two", prompt=two, **greedy), line("ids", prompt=[[1, 2], [3]], **greedy)]
    asked += [line("long", prompt=[one, "x" * 1000], **greedy)]
    out = tmp_path / "out.jsonl"
    assert main(["run-batch", "-i", write(tmp_path / "in.jsonl", asked), "-o", str(out), *FLAGS]) == 1
    found = {name: each["body"] for name, each in answers(out).items()}
    both = found["both"]["choices"]
    assert [choice["index"] for choice in both] == [0, 1]
    assert [choice["text"] for choice in both] == [found[name]["choices"][0]["text"] for name in ("one", "two")]
    assert found["both"]["usage"]["completion_tokens"] == 8 and len(found["ids"]["choices"]) == 2
    assert "prompt has 1001 tokens" in found["long"]["error"]["message"]
    logprobs = found["one"]["choices"][0]["logprobs"]
    assert "".join(logprobs["tokens"]) == found["one"]["choices"][0]["text"] and both[0]["logprobs"] is None
    assert [len(each) for each in logprobs.values()] == [4, 4, 4, 4] and logprobs["text_offset"][0] == 0
    for token, chosen, top in zip(
        logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
    ):
        assert top[token] == chosen == max(top.values()) <= 0 and len(top) == 2


def chat_params(**body: Any) -> SamplingParams:
    request = read_request(BatchLine("a", CHAT, {"messages": [], **body}))
    return sampling_params(request, {"temperature": 0.5})


def test_a_chat_has_its_log_probabilities_per_token() -> None:
    wanted = BatchLine("a", CHAT, {"messages": [], "logprobs": True, "top_logprobs": 1})
    assert chat_params(logprobs=True, top_logprobs=1).logprobs == 1
    assert chat_params(logprobs=False).logprobs is None
    with pytest.raises(RequestError, match="true if top_logprobs is given"):
        chat_params(top_logprobs=1)
    entries = ({7: Logprob(-0.5, 2, "é"), 8: Logprob(-0.25, 1, None)},)
    output = RequestOutput("a", None, [1], [CompletionOutput(0, "é", (7,), "stop", None, entries)], True)
    (choice,) = answer(wanted, read_request(wanted), "m", [output])["response"]["body"]["choices"]
    chosen = {"token": "é", "logprob": -0.5, "bytes": [195, 169]}
    other = {"token": "token_id:8", "logprob": -0.25, "bytes": list(b"token_id:8")}
    # Only the likeliest token is listed.
    assert choice["logprobs"] == {"content": [chosen | {"top_logprobs": [other]}]}


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("{", "line 1: not valid JSON"),
        ('{"custom_id": 3}', "line 1: must be an object with a custom_id"),
        ("{\n[]", "line 2: must be an object with a custom_id"),
        ("\n", "holds no request"),
    ],
)
def test_a_file_that_is_no_batch_is_one_line(
    asked: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in.jsonl").write_text(asked)
    assert main(["run-batch", "-i", str(tmp_path / "in.jsonl"), "-o", str(tmp_path / "out.jsonl")]) == 2
    error = capfd.readouterr().err.strip()
    assert error.startswith("fastdecode: error: ") and message in error and "\n" not in error


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ('{"custom_id": "b", "response": {}}\n', "answers 'b', which is not in the input"),
        ('{"custom_id": "a"}\n', "no answer"),
        ('{"custom_id": "a", "response": {"status_code": 200, "body": {"model": "other"}}}\n', "by model 'other'"),
        ('{"custom_id": [], "response": {}}\n', "no answer"),
        ("text\n", "no answer"),
        ("a line of notes without an end", "line 1 is no answer"),
    ],
)
def test_another_batch_s_output_is_left_alone(
    written: str, message: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked, out = write(tmp_path / "in.jsonl", [line("a", prompt="x")]), tmp_path / "out.jsonl"
    out.write_text(written)
    assert main(["run-batch", "-i", asked, "-o", str(out)]) == 2
    assert message in capfd.readouterr().err and out.read_text() == written


@pytest.mark.parametrize("device", ["/dev/full", "/dev/null", "/dev/zero"])
def test_an_output_that_is_no_regular_file_is_refused(
    device: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A device has no end that could be read."""
    asked = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    assert main(["run-batch", "-i", asked, "-o", device]) == 2
    assert f"{device}: must be a regular file" in capfd.readouterr().err


def test_what_cannot_be_read_twice_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "-i", "/dev/null", "-o", str(tmp_path / "out.jsonl")]) == 2
    assert "/dev/null: must be a regular file" in capfd.readouterr().err
    asked = write(tmp_path / "in.jsonl", [line("a", prompt="x")])
    before = Path(asked).read_text()
    assert main(["run-batch", "-i", asked, "-o", asked]) == 2
    assert "no answer" in capfd.readouterr().err and Path(asked).read_text() == before


def test_a_chat_takes_the_model_s_template() -> None:
    """The prompt ends where the answer begins, and the length is the model's unless max_tokens is given."""

    class Tokenizer(HFTokenizer):
        def __init__(self) -> None:
            from transformers import AutoTokenizer

            from fastdecode.api.engine_fields import DEMO_MODEL

            self.hf = AutoTokenizer.from_pretrained(DEMO_MODEL)
            self.hf.chat_template = (
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                "{% if add_generation_prompt %}<assistant>{% endif %}"
            )

    tokenizer = Tokenizer()
    assert tokenizer.hf.decode(tokenizer.encode_chat([{"role": "user", "content": "hi"}])) == "<user>hi<assistant>"
    for wrong in ("hi", [], [{"content": "hi"}]):
        with pytest.raises(RequestError, match="messages must be a list"):
            tokenizer.encode_chat(wrong)
    asked = chat_params(max_completion_tokens=7, temperature=None)
    assert (asked.max_tokens, asked.temperature) == (7, 0.5)
    assert chat_params().max_tokens is None
    completion = BatchLine("a", COMPLETIONS, {"prompt": "x"})
    assert sampling_params(read_request(completion), {}).max_tokens == 16
    with pytest.raises(ConfigError, match="top_p"):
        chat_params(top_p=2)


def test_responses_and_names_of_the_model(tmp_path: Path) -> None:
    """Rows of the Responses API and served names are accepted; an unknown name is refused in its row."""
    chat = tmp_path / "template"
    chat.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}{{ suffix }}")
    asked = [
        line("c", "/v1/chat/completions", messages=[{"role": "user", "content": "x = "}], max_tokens=4, temperature=0),
        line("r", "/v1/responses", input="x = ", max_output_tokens=4, temperature=0, model="b"),
        line("f", "/v1/responses", input="x", text={"format": {"type": "json_object"}}, max_output_tokens=3),
        line("w", prompt="x = ", model="other"),
        line("p", "/v1/responses", input="x", previous_response_id="resp_1"),
    ]
    out = tmp_path / "out.jsonl"
    flags = ["--served-model-name", "a", "b", "--chat-template", str(chat)]
    flags += ["--default-chat-template-kwargs", '{"suffix": "1"}', "--enable-metrics", "--port", "8001"]
    assert main(["run-batch", "-i", write(tmp_path / "in.jsonl", asked), "-o", str(out), *FLAGS, *flags]) == 1
    found = answers(out)
    assert [found[name]["status_code"] for name in "crfwp"] == [200, 200, 200, 400, 400]
    response = found["r"]["body"]
    assert (response["object"], response["model"], response["status"]) == ("response", "a", "incomplete")
    assert response["output"][0]["content"][0]["text"] == found["c"]["body"]["choices"][0]["message"]["content"] != ""
    assert found["c"]["body"]["usage"]["prompt_tokens"] == response["usage"]["input_tokens"] == 5
    assert found["f"]["body"]["text"]["format"]["type"] == "json_object"
    assert "the model 'other' does not exist: a, b does" in found["w"]["body"]["error"]["message"]
    assert "a batch stores no responses" in found["p"]["body"]["error"]["message"]


def test_an_interrupted_run_says_how_far_it_is(tmp_path: Path, whole: dict[str, str]) -> None:
    """After Ctrl-C the output says how many rows are done, and how to go on."""
    asked, out = write(tmp_path / "in.jsonl", REQUESTS), tmp_path / "out.jsonl"
    process = subprocess.Popen(run_batch(asked, out), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    wait_for_answers(out, process)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=PATIENCE_SECONDS)
    if process.returncode == 130:  # Otherwise the run had ended by itself.
        done = len(answers(out))
        told = f"fastdecode: {out}: {done} of 6 requests are answered: the same command goes on with the rest"
        assert told in error.splitlines()
        assert main(["run-batch", "-i", asked, "-o", str(out), *FLAGS]) == 0
    assert texts(out) == whole
