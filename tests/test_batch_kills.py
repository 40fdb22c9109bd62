"""``fastdecode run-batch``, killed with -9 again and again, answers each row once, as if never killed."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.examples import SEES_ALL
from helpers.forks import FASTDECODE
from helpers.processes import PATIENCE_SECONDS

from fastdecode.journal.past import pasts_of
from fastdecode.journal.records import read

pytestmark = pytest.mark.slow

NUM_KILLS = 10 if SEES_ALL else 4
ROWS = 8 * NUM_KILLS
FLAGS = ["--max-model-len", "256", "--max-num-seqs", "4", "--kv-cache-memory", "16MiB", "--s-threads", "1"]
FLAGS += ["--r-threads", "1"]


def rows() -> list[dict[str, Any]]:
    """Return rows that are greedy, seeded or unseeded, with one or several texts; every ninth cannot run."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 1.0, "seed": 3, "n": 2, "logprobs": 2},
        {"temperature": 1.0},
        {"prompt": ["import os", "def g():"], "temperature": 0.8},
    ]
    return [
        {"custom_id": f"row {number}", "method": "POST", "url": "/v1/completions"}
        | {"body": {"prompt": f"def f{number}(x):", "max_tokens": 8 + number % 5 * 8} | kinds[number % 4]}
        | ({"body": {"prompt": "x", "top_p": 2}} if number % 9 == 8 else {})
        for number in range(ROWS)
    ]


def answers(path: Path) -> dict[str, Any]:
    """Return the answer to each custom_id, which must be there once, without the answer's own ids."""
    lines = [json.loads(text) for text in path.read_text().splitlines()]
    assert len({line["custom_id"] for line in lines}) == len(lines)
    for line in lines:
        for name in ("id", "created"):
            line["response"]["body"].pop(name, None)
    return {line["custom_id"]: (line["response"]["status_code"], line["response"]["body"]) for line in lines}


def start(asked: Path, out: Path, *more: str) -> subprocess.Popen[bytes]:
    """Start a ``run-batch`` whose output is not printed."""
    command = [FASTDECODE, "run-batch", "-i", str(asked), "-o", str(out), *FLAGS, *more]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def num_tokens_ahead(journal: Path) -> int:
    """Return the output tokens of requests in a journal that have not ended."""
    pasts = pasts_of(read(journal.read_bytes())[0]).values() if journal.exists() else ()
    return sum(past.num_tokens - len(past.asked.prompt_token_ids) for past in pasts if not past.ended)


def test_kills_change_nothing(tmp_path: Path) -> None:
    """Kills at random moments, at the start, between rows and within rows, change no answer.

    Every other run keeps a journal, which has tokens of rows that were not answered.
    """
    asked, whole, out = (tmp_path / name for name in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    asked.write_text("".join(json.dumps(row) + "\n" for row in rows()))
    rng = random.Random(17)
    assert start(asked, whole).wait() == 1  # The status is 1 since some rows cannot run.
    seen, unanswered = [], 0
    for number in range(NUM_KILLS):
        more = ["--journal", str(tmp_path / "journal")] if number % 2 == 0 else []
        process, before = start(asked, out, *more), num_lines(out)
        wanted = before + rng.randrange(5)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while num_lines(out) < wanted and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(rng.uniform(0, 0.2))
        process.kill()
        assert process.wait() == -signal.SIGKILL
        seen.append(num_lines(out))
        unanswered += num_tokens_ahead(tmp_path / "journal" / "journal") if more else 0
        if rng.random() < 0.3 and seen[-1]:  # The file ends as if the process had died within a write.
            os.truncate(out, out.stat().st_size - rng.randrange(1, 40))
    assert 0 < seen[-1] < ROWS and unanswered
    assert start(asked, out, "--journal", str(tmp_path / "journal")).wait() == 1
    assert num_tokens_ahead(tmp_path / "journal" / "journal") == 0
    assert list(answers(whole)) != [] and answers(out) == answers(whole) and len(answers(out)) == ROWS
