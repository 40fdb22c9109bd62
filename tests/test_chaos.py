"""A few rounds of ``make chaos``, of the kinds that take a second or two each."""

from __future__ import annotations

import subprocess
from collections import Counter
from pathlib import Path

import pytest
from chaos.configuration import KINDS, REMOVES, draw
from helpers.examples import SEES_ALL
from helpers.forks import relayed
from helpers.processes import script

FIRST_SEED, ROUNDS = 4650, 10 if SEES_ALL else 5
"""The first seed and the number of rounds. The first five rounds have all pools, ranges, two copies and drafts; they
take about ten seconds of CPU time.
"""

AUDITED_SEED = 5323
"""The seed of a short round over two R-workers in its own process that audits all rows."""


@pytest.mark.slow
@pytest.mark.timeout(500)
def test_rounds_are_clean() -> None:
    """Rounds have random settings, kills, drains and joins; an unclean round is printed with its seed."""
    words = ["chaos", "--small", "--rounds", str(ROUNDS), "--seed", str(FIRST_SEED)]
    command = script(f"import runpy\nsys.argv = {words}\nrunpy.run_module('chaos', run_name='__main__')")
    done = subprocess.run(relayed(command), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_events_can_befall_their_rounds() -> None:
    """R-workers are taken only where others remain, and all kinds of rounds and events are drawn."""
    seen = Counter[str]()
    for seed in range(300):
        drawn = draw(seed)
        standing = drawn.num_workers
        for event in drawn.events:
            standing += (event.action == "join") - REMOVES.get(event.action, 0)
            assert standing >= 1 or event.action == "kill rank", seed
            seen[event.action] += 1
        seen[drawn.kind] += 1
    assert set(seen) >= {*KINDS, "kill", "kill two", "kill rank", "kill prefill", "drain", "terminate", "join", "reset"}


@pytest.mark.slow
def test_a_false_alarm_of_an_audit_is_a_fault(tmp_path: Path) -> None:
    """A round's audit names an R-worker whose results are really wrong, which stands for a false alarm."""
    code = f"""
        from pathlib import Path
        from chaos import jobs
        from chaos.configuration import draw
        from chaos.round import Round
        from fastdecode.cluster.r_worker.faults import Faults, FaultyRWorker
        from helpers.r_workers import pool_of
        begin, is_faulty = Round._begin, False
        def spoiled(self, wanted):
            engine = begin(self, wanted)
            if is_faulty:
                worker = pool_of(engine).workers[0]
                worker._worker = FaultyRWorker(worker._open, Faults(every_row=10), [0])
            return engine
        Round._begin = spoiled
        for is_faulty in (False, True):
            result = jobs.run_round(draw({AUDITED_SEED}, ("plain",), True), Path({str(tmp_path)!r}))
            print(result.counts["audited rounds"], result.counts["audited"] > 50)
            print(*(fault for fault in result.faults if fault.startswith("audit:")))
            assert is_faulty or not result.faults
    """
    done = subprocess.run(relayed(script(code)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted, sound, _, alarm = done.stdout.splitlines()
    assert (counted, sound) == ("1 True", "")
    assert alarm == "audit: a false alarm: ('inproc-0',) named, 0 undecided"


def test_an_audit_without_rows_is_a_fault() -> None:
    from chaos.round import Result

    result = Result(counts=Counter(steps=100))
    result.check_audit(0, (), 0, 0.02)
    assert result.faults == []
    result.check_audit(0, (), 0, 0.3)
    assert result.faults == ["audit: no row of 100 steps was audited"]


@pytest.mark.slow
def test_what_a_round_leaves_behind_is_found(tmp_path: Path) -> None:
    """A process whose parent is dead, unnamed memory, shared memory and a file are each found."""
    code = f"""
        import mmap, os, subprocess, sys
        from pathlib import Path
        from chaos import processes
        processes.END_SECONDS = 0.3
        left = processes.Leftovers(Path({str(tmp_path / "temporary")!r}))
        left.begin()
        assert left.faults() == [], left.faults()
        descriptor = os.memfd_create("forgotten")
        segment = Path("/dev/shm") / f"fastdecode-test-{{os.getpid()}}"
        segment.write_bytes(bytes(4096))
        try:
            with segment.open("r+b") as file:
                mapped = mmap.mmap(file.fileno(), 4096)
            (Path({str(tmp_path / "temporary")!r}) / "forgotten.txt").touch()
            orphan = "import subprocess; subprocess.Popen(['sleep', '100'])"
            subprocess.run([sys.executable, "-c", orphan], check=True)
            left.look()
            mapped.close()
            for fault in left.faults():
                print(fault)
        finally:
            segment.unlink()
    """
    done = subprocess.run(relayed(script(code)), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kinds = [line.split()[1:3] for line in done.stdout.splitlines()]
    assert [kind[0] for kind in kinds] == ["process", "shared", "1", "file"], done.stdout
    assert "sleep 100" in done.stdout and "/memfd:forgotten" in done.stdout


def test_only_a_tie_excuses_another_token() -> None:
    """Ranks add in another order. They may choose the other of two equal tokens, but no other token."""
    from chaos.reference import Answer, ties_of

    from fastdecode.api.outputs import CompletionOutput, Logprob

    logprobs = [{5: Logprob(-0.5, 1), 6: Logprob(-0.9, 2)}, {7: Logprob(-1.0, 1), 8: Logprob(-1.000001, 2)}]
    ties = ties_of(CompletionOutput(0, "", [5, 7], logprobs=logprobs))
    answer = Answer((5, 7, 9), "", "length", ties)
    assert ties == {1: [8]}
    assert answer.tie_of((5, 8, 3)) == 1
    others = (5, 7, 9), (5, 6, 9), (6, 8, 9), (5, 7, 3), (5, 8)
    assert [answer.tie_of(each) for each in others] == [None] * len(others)
