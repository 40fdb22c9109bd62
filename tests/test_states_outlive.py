"""States that the S-worker keeps (``--state-on s``) outlive it as files: the next one continues from them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers import r_workers
from helpers.forks import relayed
from helpers.processes import PATIENCE_SECONDS
from helpers.tiny_hybrids import random_prompts, save_with_texts

from fastdecode.cluster.pool.state_files import StateFiles
from fastdecode.cluster.pool.state_pairs import TABLE_TOKENS
from fastdecode.cluster.r_worker.host import RWorkerSize, begin_step, end_step, make_rworker
from fastdecode.core.held import HeldSequence
from fastdecode.core.types import CONTROL, SPAN, RWorkerInfo, Verb, WorkerPlan
from fastdecode.kinds import Recurrent
from fastdecode.kinds.layout import KVLayout

NUM_TOKENS, LENGTHS = 60, (70, 33, 1)
PROGRAM = """
import json, os, signal, sys
from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.engine.engine import LLMEngine
told = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=told["num_tokens"], ignore_eos=True, detokenize=False)
engine = LLMEngine(EngineConfig(**told["settings"]))
for number, prompt in enumerate(told["prompts"]):
    engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
tokens, steps = {}, 0
while engine.has_unfinished_requests():
    for output in engine.step():
        tokens[output.request_id] = list(output.outputs[0].token_ids)
    steps += 1
    if steps == told["kill_at"]:
        os.kill(os.getpid(), signal.SIGKILL)
engine.close()
print("FOUND", json.dumps([[tokens[str(number)] for number in range(len(told["prompts"]))], steps]))
"""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[int]]]:
    """A folder with a tiny LFM2, and what transformers generates with it."""
    folder = tmp_path_factory.mktemp("outlive") / "lfm2"
    return folder, save_with_texts(folder, "lfm2", random_prompts(LENGTHS), NUM_TOKENS)


@pytest.fixture
def pair() -> Iterator[list[tuple[Any, str]]]:
    """Two R-workers that listen."""
    with ExitStack() as stack:
        yield [stack.enter_context(r_workers.listening()) for _ in range(2)]


def _run(settings: dict[str, Any], kill_at: int) -> list[Any] | None:
    """Run an engine until it has answered all; return tokens, its number of steps, and how many tokens it adopted.
    Return None if it was killed after ``kill_at`` steps.
    """
    told = {"settings": settings, "prompts": random_prompts(LENGTHS), "num_tokens": NUM_TOKENS, "kill_at": kill_at}
    command = relayed([sys.executable, "-c", PROGRAM, json.dumps(told)])
    environment = {**os.environ, "PYTHONSAFEPATH": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=PATIENCE_SECONDS
    )
    if kill_at:
        assert done.returncode == -9, done.stderr
        return None
    assert done.returncode == 0, done.stderr
    kept = sum(map(int, re.findall(r"has kept (\d+) tokens of the session", done.stderr)))
    return [*json.loads(done.stdout.split("FOUND", 1)[1]), kept]


@pytest.mark.slow
@pytest.mark.parametrize("drafts", [None, {"method": "ngram", "num_speculative_tokens": 2}], ids=["plain", "drafts"])
def test_a_killed_engine_s_states_are_used_by_the_next(
    drafts: Any, saved: Any, pair: list[tuple[Any, str]], tmp_path: Path
) -> None:
    """Killed twice, and the second time after few steps; then a whole run. It leaves no file of a state."""
    folder, expected = saved
    settings = {"model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True, "s_threads": 1}
    settings |= {"max_model_len": 256, "block_size": 16, "state_on": "s", "state_memory": "64MiB", "max_num_seqs": 4}
    settings |= {"r_workers": ",".join(address for _, address in pair), "session": "s", "keep_session": 60.0}
    settings |= {"journal": str(tmp_path / "journal"), "speculative_config": drafts}
    _run(settings, 25)
    assert list((tmp_path / "journal" / "states").rglob("*.state"))
    _run(settings, 4)
    found = _run(settings, 0)
    assert found is not None
    tokens, steps, kept = found
    assert tokens == expected
    assert kept > sum(LENGTHS) and steps < NUM_TOKENS
    assert not list((tmp_path / "journal" / "states").rglob("*.state"))


FILTERS = np.random.default_rng(9).standard_normal(48).astype(np.float32).tobytes()
LAYOUT = KVLayout(
    (Recurrent(1, 16, 1.0, "window", 0, 0, 3, 0, False, False, 16, filters=FILTERS),), "float32", "float32"
)


def _states(kept_rows: int = 0) -> Any:
    return make_rworker(LAYOUT.keeping(kept_rows), TABLE_TOKENS, RWorkerSize(1 << 16, 1))


def _info(epoch: int) -> RWorkerInfo:
    return RWorkerInfo("r:1", 10, 16, 1, "scalar", True, epoch=epoch)


def _plan(controls: list[tuple[int, int, int, int]], spans: list[tuple[int, int, int, int]]) -> WorkerPlan:
    return WorkerPlan(np.array(controls, CONTROL), (np.array(spans, SPAN),))


def _step(files: StateFiles, states: Any, controls: list[Any], spans: list[Any], seed: int = 0) -> None:
    """Take a step as a pair does."""
    plan = _plan(controls, spans)
    files._next_seconds = 0.0
    files.before_step(states, plan)
    if files._saving:
        files._saving.result()
    begin_step(states, plan)
    rows = sum(span[2] for span in spans)
    if rows:
        k = np.random.default_rng(seed).standard_normal((rows, 1, 16)).astype(np.float32)
        attending = sum(span[2] for span in spans if span[3] == 1)
        empty = np.zeros((rows, 1, 0), np.float32)
        o = np.zeros((attending, 1, 16), np.float32)
        states.run(0, 0, empty[:attending], k, empty, o, np.zeros((0, 1, 18), np.float32))
    end_step(states)


def test_only_files_of_the_last_s_worker_count_and_only_whole_ones(tmp_path: Path) -> None:
    first, files = _states(), StateFiles(tmp_path, _info(4))
    for _ in range(3):
        _step(files, first, [], [(1, first.sequence_length(1) if 1 in first.sequence_ids() else 0, 5, 1)])
    _step(files, first, [], [(2, 0, 7, 1)])
    files.close()
    wanted = first.export(1, 15, 0).tobytes()
    held = [HeldSequence(1, 20, (0, 1)), HeldSequence(2, 7, (2,)), HeldSequence(3, 9, (3,))]
    for epoch, found in ((7, []), (5, [HeldSequence(1, 15, (0,), least=15)])):
        states, again = _states(), StateFiles(tmp_path / str(epoch), _info(epoch))
        again._folder.rmdir()
        again._folder.symlink_to(_copied(tmp_path, files._folder, str(epoch)))
        assert again.load(states, held, 16) == found
        assert all(states.export(each.cache_id, each.num_tokens, 0).tobytes() == wanted for each in found)
        assert len(list(again._folder.iterdir())) == len(found)
    states, again = _states(), StateFiles(tmp_path, _info(5))
    path = again._folder / "1.4.state"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert again.load(states, held, 16) == [] and states.sequence_ids() == []


def _copied(root: Path, folder: Path, name: str) -> Path:
    """Return a copy of ``folder``."""
    copy = root / f"copy-{name}"
    copy.mkdir()
    for path in folder.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def test_a_refused_draft_is_not_in_a_saved_state(tmp_path: Path) -> None:
    """The state is saved after the tokens that the next step leaves; one that no longer holds is removed at once."""
    states, files = _states(kept_rows=4), StateFiles(tmp_path, _info(1))
    _step(files, states, [], [(1, 0, 6, 1)])
    _step(files, states, [], [(1, 6, 4, 1)], seed=1)
    _step(files, states, [(int(Verb.TRUNCATE), 1, 0, 8)], [(1, 8, 1, 1)], seed=2)
    files.close()
    loaded, after = _states(), StateFiles(tmp_path, _info(2))
    [kept] = after.load(loaded, [HeldSequence(1, 9, (0,))], 16)
    assert kept.num_tokens == 8
    straight = _states()
    _step(StateFiles(tmp_path / "x", _info(9)), straight, [], [(1, 0, 6, 1)])
    _step(StateFiles(tmp_path / "y", _info(9)), straight, [], [(1, 6, 2, 1)], seed=1)
    assert np.allclose(loaded.export(1, 8, 0).view(np.float32), straight.export(1, 8, 0).view(np.float32), atol=1e-6)
    _step(after, loaded, [(int(Verb.RELEASE), 1, 0, 0)], [])
    assert not list(after._folder.iterdir())
