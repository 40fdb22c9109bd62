"""``bench serve``: its requests, its reading of whole and broken streams, and vLLM's figures, table and JSON."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.processes import PATIENCE_SECONDS
from helpers.stream_server import DONE, Chunk, completion, running, usage

from fastdecode.api.engine_fields import DEMO_MODEL
from fastdecode.cli.main import main
from fastdecode.perfmodel.lab.cli.bench_serve import load_tokenizer
from fastdecode.perfmodel.lab.measure.dataset import RampUp, WorkItem
from fastdecode.perfmodel.lab.measure.serving import ServedRequest, Target, run_load
from fastdecode.perfmodel.lab.measure.serving_report import DETAILS, METRICS, serving_report, table_lines

pytestmark = pytest.mark.slow

MODEL = {"id": "tiny", "root": str(DEMO_MODEL), "max_model_len": 512}
COMPLETIONS = "/v1/completions"
RAMP = ["--ramp-up-strategy", "linear"]

KEYS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts", "request_rate",
    "burstiness", "max_concurrency", "duration", "completed", "failed", "total_input_tokens", "total_output_tokens",
    "request_throughput", "request_goodput", "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests", *(f"{each}_{name}_ms" for name in METRICS for each in ("mean", "median", "std", "p99")),
}  # fmt: skip
"""The keys that vLLM 0.32 writes with the same flags, except ``rtfx``."""


def load(url: str, *items: WorkItem, chat: bool = False, at_once: int | None = None) -> list[ServedRequest]:
    served: list[ServedRequest] = []
    target = Target(url, "tiny", chat, {"Authorization": "Bearer k"}, {"temperature": 0.5})
    asyncio.run(run_load(target, items, at_once, served))
    return served


def one(*chunks: Chunk, chat: bool = False) -> ServedRequest:
    """Return what the client reads from one stream."""
    with running(lambda body: list(chunks)) as server:
        return load(server.url + COMPLETIONS, WorkItem([1, 2, 3], 4, prompt="abc"), chat=chat)[0]


# What is sent.


def test_a_completion_and_a_chat() -> None:
    """Prompts without text are sent as token ids; completions and chats get the same options, fields and headers."""
    same = {"model": "tiny", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0.5}
    with running(lambda body: [*completion("a"), DONE]) as server:
        load(server.url + COMPLETIONS, WorkItem([1, 2], 4))
        load(server.url + COMPLETIONS, WorkItem([1, 2], 4, prompt="ab"))
        load(server.url + "/v1/chat/completions", WorkItem([1, 2], 4, prompt="ab"), chat=True)
    assert server.asked[0] == {"path": COMPLETIONS, "prompt": [1, 2], "max_tokens": 4, **same}
    assert server.asked[1] == {"path": COMPLETIONS, "prompt": "ab", "max_tokens": 4, **same}
    messages = [{"role": "user", "content": "ab"}]
    chat = {"path": "/v1/chat/completions", "messages": messages, "max_completion_tokens": 4}
    assert server.asked[2] == chat | same
    assert all(headers["Authorization"] == "Bearer k" for headers in server.headers)


def test_requests_are_sent_when_they_are_due() -> None:
    """Requests are sent when due, whether or not earlier ones have ended."""
    arrivals = [0.0, 0.1, 0.12, 0.4]
    with running(lambda body: [*completion("a", gap=2.5), DONE]) as server:
        served = load(server.url + COMPLETIONS, *(WorkItem([1], 1, seconds) for seconds in arrivals))
    late = [request.start_seconds - served[0].start_seconds for request in served]
    assert all(due - 0.05 <= start for start, due in zip(late, arrivals, strict=True))
    assert server.most_at_once >= 3


def test_so_many_at_once() -> None:
    with running(lambda body: [*completion("a", "b", gap=0.03), DONE]) as server:
        served = load(server.url + COMPLETIONS, *[WorkItem([1], 2)] * 9, at_once=2)
    assert server.most_at_once == 2 and not any(request.error for request in served)
    assert max(request.queue_seconds for request in served) > 0.1
    assert served[0].queue_seconds < served[8].queue_seconds
    starts = sorted(request.start_seconds for request in served)
    assert starts[2] - starts[0] > 0.05  # The third request waits for one of the first two.


# What comes back.


def test_moments_of_a_stream() -> None:
    """The first token and the gaps between the others are timed; the lengths are those that the server counts."""
    request = one(0.1, *completion("a"), *completion("b", "", gap=0.05), usage(7, 3), DONE)
    assert request.error == "" and request.text == "ab"
    assert (request.prompt_len, request.output_len) == (7, 3)
    assert request.ttft >= 0.1 and len(request.itls) == 2 and min(request.itls) >= 0
    assert request.latency >= 0.2 and request.latency == pytest.approx(request.ttft + sum(request.itls))
    assert request.tpot == pytest.approx(sum(request.itls) / 2)


def test_without_usage_chunks_are_counted() -> None:
    request = one(*completion("a", "b", "c"), DONE)
    assert (request.prompt_len, request.output_len, request.error) == (3, 3, "")


def test_the_role_of_a_chat_is_no_token() -> None:
    """A server may send a chat's role long before the first token."""

    def delta(**fields: Any) -> Chunk:
        return {"choices": [{"index": 0, "delta": fields}]}

    request = one(
        delta(role="assistant", content=""), 0.1, delta(content="a"), delta(content="b"), delta(), DONE, chat=True
    )
    assert request.ttft >= 0.1 and len(request.token_seconds) == 2 and request.text == "ab"


def test_events_cut_anywhere_and_comments() -> None:
    event = b'data: {"choices": [{"text": "\xc3\xa9"}]}\r\n\r\n'
    request = one(b": keep-alive\n\n", event[:30], 0.02, event[30:], b"event: x\n\n", event, DONE)
    assert request.text == "éé" and request.error == ""


@pytest.mark.parametrize(
    ("chunks", "error"),
    [
        ([*completion("a")], "the stream ended before its [DONE]"),
        ([DONE], "the stream ended without a token"),
        ([], "the stream ended before its [DONE]"),
        ([*completion("a"), b"data: {nonsense\n\n", DONE], "JSON is malformed"),
        ([*completion("a"), b'data: {"choices": 7}\n\n', DONE], "Expected `array"),
        ([*completion("a"), {"error": {"message": "lost"}}, DONE], "ended with an error: {'message': 'lost'}"),
        ([*completion("a"), b"data: " + b"x" * (5 << 20)], "LineTooLong"),
    ],
)  # fmt: skip
def test_a_broken_stream_is_a_failed_request(chunks: list[Chunk], error: str) -> None:
    assert error in one(*chunks).error


def test_refusals_and_lost_connections() -> None:
    """One request's failure does not affect the others."""
    with running(lambda body: 503 if body["prompt"] == [9] else [*completion("a"), DONE]) as server:
        served = load(server.url + COMPLETIONS, WorkItem([9], 1), WorkItem([1], 1))
        assert served[0].error == '503 Service Unavailable: {"error": {"message": "the queue is full"}}'
        assert served[1].error == ""
        url = server.url
    assert "ClientConnectorError" in load(url + COMPLETIONS, WorkItem([1], 1))[0].error


# The report.


def request(start: float, *tokens: float, error: str = "", prompt_len: int = 10) -> ServedRequest:
    return ServedRequest(prompt_len, len(tokens), start, 0.0, [start + each for each in tokens], "x", error)


SERVED = [
    request(100.0, 0.1, 0.2, 0.4),
    request(100.5, 0.3, 0.4, 0.5, 1.3),
    request(101.0, 0.5),
    request(101.0, 0.2, error="503"),
]


def test_figures_by_hand() -> None:
    report = serving_report(SERVED, 2.0, {}, list(METRICS), [50.0, 99.9])
    assert (report["completed"], report["failed"]) == (3, 1)
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (30, 8)
    assert report["request_throughput"] == 1.5 and report["request_goodput"] is None
    assert (report["output_throughput"], report["total_token_throughput"]) == (4.0, 19.0)
    assert report["mean_ttft_ms"] == pytest.approx(300) and report["p50_ttft_ms"] == pytest.approx(300)
    # The third request has one token, so it has no time per further token.
    assert report["mean_tpot_ms"] == pytest.approx((150 + 1000 / 3) / 2)
    assert report["median_itl_ms"] == pytest.approx(100) and report["mean_itl_ms"] == pytest.approx(260)
    assert report["mean_e2el_ms"] == pytest.approx((400 + 1300 + 500) / 3)
    assert report["std_ttft_ms"] == pytest.approx(np.std([100, 300, 500]))
    assert report["p99.9_ttft_ms"] == pytest.approx(np.percentile([100, 300, 500], 99.9))
    # Tokens came 0.1, 0.2, 0.4, 0.8 and 0.9 seconds after the first start.
    assert report["max_output_tokens_per_s"] == 5.0
    assert report["max_concurrent_requests"] == 2
    assert report["output_lens"] == [3, 4, 1, 0] and report["errors"] == ["", "", "", "503"]


@pytest.mark.parametrize(
    ("goodput", "good"),
    [
        ({"ttft": 300.1}, 2),
        ({"tpot": 200}, 2),
        ({"e2el": 500.1}, 2),
        ({"ttft": 300.1, "e2el": 500.1}, 1),
        ({"ttft": 0}, 0),
    ],
)
def test_goodput_counts_requests_within_all_objectives(goodput: dict[str, float], good: int) -> None:
    assert serving_report(SERVED, 2.0, goodput, [], [])["request_goodput"] == good / 2.0


def test_nothing_came_back() -> None:
    report = serving_report([request(0.0, error="503")], 1.0, {"ttft": 5}, list(METRICS), [99.0])
    assert report["completed"] == 0 and report["request_goodput"] == 0 and report["p99_itl_ms"] == 0
    json.dumps(report, allow_nan=False)


def test_vllms_table() -> None:
    report = {"max_concurrency": 4, "request_rate": 2.5} | serving_report(SERVED, 2.0, {"ttft": 1}, ["itl"], [99.0])
    assert (
        "\n".join(table_lines(report, ["itl"]))
        == """\
============ Serving Benchmark Result ============
Successful requests:                     3         
Failed requests:                         1         
Maximum request concurrency:             4         
Request rate configured (RPS):           2.50      
Benchmark duration (s):                  2.00      
Total input tokens:                      30        
Total generated tokens:                  8         
Request throughput (req/s):              1.50      
Request goodput (req/s):                 0.00      
Output token throughput (tok/s):         4.00      
Peak output token throughput (tok/s):    5.00      
Peak concurrent requests:                2.00      
Total token throughput (tok/s):          19.00     
---------------Inter-token Latency----------------
Mean ITL (ms):                           260.00    
Median ITL (ms):                         100.00    
P99 ITL (ms):                            776.00    
=================================================="""
    )


# The command.


def tokens_for(body: dict[str, Any]) -> list[Chunk]:
    """Return as many chunks as ``body`` asks for."""
    count = body.get("max_tokens") or body["max_completion_tokens"]
    given = len(body["prompt"]) if "prompt" in body else 5
    key = "text" if "prompt" in body else "delta"
    event: Chunk = {"choices": [{key: "a" if key == "text" else {"content": "a"}}]}
    return [0.002, *[event] * count, usage(given, count), DONE]


def test_random_prompts_and_the_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Token ids of exact lengths are sent and ignore the end; the JSON has all of vLLM's keys, and details if asked."""
    more = ["--num-prompts", "5", "--input-len", "12", "--output-len", "3", "--num-warmups", "2"]
    more += ["--goodput", "ttft:60000", "--save-result", "--save-detailed", "--result-dir", str(tmp_path / "new")]
    more += ["--result-filename", "r.json", "--metadata", "host=a", "--temperature", "0"]
    with running(tokens_for, MODEL) as server:
        assert main(["bench", "serve", "--base-url", server.url + "/", *more]) == 0
    assert len(server.asked) == 7  # Requests that are sent together may arrive in any order.
    assert server.asked[0]["prompt"] in [body["prompt"] for body in server.asked[2:]]
    assert all(len(body["prompt"]) == 12 and body["ignore_eos"] and body["temperature"] == 0 for body in server.asked)
    report = json.loads((tmp_path / "new" / "r.json").read_text())
    assert set(report) == KEYS | set(DETAILS) | {"host"}
    assert (report["completed"], report["total_input_tokens"], report["total_output_tokens"]) == (5, 60, 15)
    assert report["request_goodput"] == report["request_throughput"] and report["request_rate"] == "inf"
    assert report["model_id"] == "tiny" and report["tokenizer_id"] == str(DEMO_MODEL)
    assert "Serving Benchmark Result" in capsys.readouterr().out


def test_a_chat_of_text_at_a_rate(tmp_path: Path) -> None:
    """ShareGPT's first turns are sent unchanged; the last request is sent after exactly their number over the rate."""
    talks = [{"conversations": [{"value": f"question {i}"}, {"value": "yes"}]} for i in range(8)]
    (tmp_path / "s.json").write_text(json.dumps(talks))
    more = ["--dataset-name", "sharegpt", "--dataset-path", str(tmp_path / "s.json"), "--backend", "openai-chat"]
    more += ["--request-rate", "20", "--burstiness", "0.5", "--save-result", "--save-detailed"]
    more += ["--result-dir", str(tmp_path), "--result-filename", "r.json"]
    with running(tokens_for, MODEL) as server:
        assert main(["bench", "serve", "--base-url", server.url, *more]) == 0
    assert sorted(body["messages"][0]["content"] for body in server.asked) == [f"question {i}" for i in range(8)]
    assert "ignore_eos" not in server.asked[0]
    report = json.loads((tmp_path / "r.json").read_text())
    assert report["duration"] >= 0.4 and set(report) == KEYS | set(DETAILS)
    assert report["output_lens"] == [len(load_tokenizer(str(DEMO_MODEL)).encode("yes").ids)] * 8
    assert all(start <= end for start, end in pairwise(report["start_times"]))


def test_requests_come_faster_and_faster(tmp_path: Path) -> None:
    """Gaps are one over the rising rate where nothing is random, also from the command line as vLLM writes it."""
    evenly = 1e12
    gaps = np.diff(RampUp("linear", 2, 10).arrivals(5, evenly, 0), prepend=0)
    assert gaps == pytest.approx([1 / 2, 1 / 4, 1 / 6, 1 / 8, 1 / 10], rel=1e-4)
    gaps = np.diff(RampUp("exponential", 1, 16).arrivals(5, evenly, 0), prepend=0)
    assert gaps == pytest.approx([1, 1 / 2, 1 / 4, 1 / 8, 1 / 16], rel=1e-4)
    drawn = np.diff(RampUp("linear", 5, 5).arrivals(20_000, 0.5, 0))
    assert drawn.mean() == pytest.approx(1 / 5, rel=0.05) and drawn.std() == pytest.approx(2**0.5 / 5, rel=0.05)
    assert RampUp("linear", 5, 9).arrivals(1, evenly, 0) == pytest.approx([1 / 5], rel=1e-4)
    flags = ["--ramp-up-strategy", "linear", "--ramp-up-start-rps", "50", "--ramp-up-end-rps", "500"]
    few = [
        "--num-prompts",
        "5",
        "--input-len",
        "2",
        "--output-len",
        "2",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    ]
    with running(tokens_for, MODEL) as server:
        assert main(["bench", "serve", "--base-url", server.url, *few, *flags]) == 0
    (saved,) = tmp_path.glob("openai-ramp-up-linear-50qps-500qps-*.json")
    report = json.loads(saved.read_text())
    assert set(report) == KEYS | {"ramp_up_strategy", "ramp_up_start_rps", "ramp_up_end_rps"}
    assert (report["ramp_up_strategy"], report["ramp_up_start_rps"], report["completed"]) == ("linear", 50, 5)


def test_all_failed_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    with running(lambda body: 503, MODEL) as server:
        few = ["--num-prompts", "12", "--input-len", "2", "--output-len", "2"]
        assert main(["bench", "serve", "--base-url", server.url, *few]) == 1
    printed = capsys.readouterr().out
    assert printed.count("Failed request: 503 Service Unavailable") == 10 and "… and 2 more failed" in printed


@pytest.mark.parametrize(
    ("flags", "status", "message"),
    [
        (["--goodput", "itl:3"], 2, "goodput: 'itl:3' must be NAME:MILLISECONDS"),
        (["--goodput", "ttft"], 2, "goodput: 'ttft' must be NAME:MILLISECONDS"),
        (["--percentile-metrics", "ttft,tbt"], 2, "percentile_metrics: 'tbt' is none of ttft, tpot, itl, e2el"),
        (["--metric-percentiles", "50,101"], 2, "comma list of numbers from 0 to 100, not '50,101'"),
        (["--max-concurrency", "0"], 2, "max_concurrency must be at least 1, not 0"),
        (["--metadata", "x"], 2, "metadata must be NAME=VALUE, not 'x'"),
        (["--burstiness", "0"], 2, "burstiness must be above 0"),
        (["--dataset-name", "custom"], 2, "needs --dataset-path"),
        (["--ramp-up-end-rps", "3"], 2, "need a --ramp-up-strategy"),
        ([*RAMP, "--ramp-up-start-rps", "3"], 2, "needs --ramp-up-start-rps and --ramp-up-end-rps"),
        ([*RAMP, "--ramp-up-start-rps", "0", "--ramp-up-end-rps", "3"], 2, "ramp_up_start_rps must be above 0"),
        ([*RAMP, "--ramp-up-start-rps", "5", "--ramp-up-end-rps", "3"], 2, "at most ramp_up_end_rps"),
        ([*RAMP, "--ramp-up-start-rps", "1", "--ramp-up-end-rps", "3", "--request-rate", "2"], 2, "give one"),
        (["--tokenizer", __file__], 2, "tokenizer: cannot read"),
        (["--input-len", "600"], 2, "prompt + output reach 728 tokens, and max_model_len is 512"),
        (["--save-result", "--result-dir", __file__], 2, "result_dir: "),
        (["--base-url", "http://127.0.0.1:9"], 1, "cannot reach http://127.0.0.1:9/v1/models"),
    ],
)
def test_refusals(flags: list[str], status: int, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Wrong arguments are refused before any request is sent."""
    with running(tokens_for, MODEL) as server:
        assert main(["bench", "serve", "--base-url", server.url, *flags]) == status
    error = capfd.readouterr().err.strip()
    assert message in error and "\n" not in error and server.asked == []


def test_ctrl_c_prints_what_has_ended_and_torch_is_not_needed() -> None:
    """Ctrl-C prints what has ended, in a process without torch whose last request never ends."""
    code = """
import sys
from fastdecode.cli.main import main
status = main(sys.argv[1:])
heavy = {"torch", "transformers"} & set(sys.modules)
sys.exit(f"bench serve brings {heavy}" if heavy else status)
"""
    with running(lambda b: [30.0] if len(server.asked) > 4 else tokens_for(b), MODEL) as server:
        few = ["--num-prompts", "5", "--input-len", "2", "--output-len", "2", "--max-concurrency", "1"]
        command = [sys.executable, "-c", code, "bench", "serve", "--base-url", server.url, *few]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as client:
            deadline = time.monotonic() + PATIENCE_SECONDS
            while len(server.asked) < 5 and time.monotonic() < deadline:
                time.sleep(0.05)
            time.sleep(0.1)
            client.send_signal(signal.SIGINT)
            output, error = client.communicate(timeout=PATIENCE_SECONDS)
    assert client.returncode == 130, error
    assert "Successful requests:                     4" in output
    assert "Failed requests:                         0" in output
