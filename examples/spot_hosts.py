"""One GPU and four spot hosts, two of which go while text is generated: python examples/spot_hosts.py

The S-worker runs on a GPU if there is one, else on this machine's CPU. R-workers ask to join, as they would from spot
hosts, which a cloud rents out cheaply and takes back at any time. Each sequence has two copies, so that a lost host
costs no time.
"""

from __future__ import annotations

# %% Four R-workers join at the S-worker's port. On several machines, give both sides `--key-file`.
import atexit
import itertools
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

from fastdecode import LLM, SamplingParams

# %% Whatever happens, the example ends after five minutes.
signal.signal(signal.SIGALRM, lambda *_: sys.exit("no end within 5 minutes: `fastdecode doctor` says what is wrong"))
signal.alarm(300)

with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    door = f"127.0.0.1:{free.getsockname()[1]}"
COMMAND = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--join", door, "--threads", "1"]


def new_host() -> subprocess.Popen[bytes]:
    """Start an R-worker that asks to join, in place of a spot host. It may start before the S-worker, or later."""
    own = os.environ | {"PYTHONSAFEPATH": "1"}  # import the installed fastdecode, not this folder
    host = subprocess.Popen([*COMMAND, "--kv-cache-memory", "64MiB"], stdout=subprocess.DEVNULL, env=own)
    atexit.register(host.kill)
    return host


hosts = [new_host() for _ in range(4)]

# %% The S-worker waits until four R-workers have joined.
prompts = [f"def {name}(self, path):\n    " for name in ("read", "write", "open", "close", "copy", "move")]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
settings = {"dtype": "float32", "max_model_len": 128}
llm = LLM(device="auto", r_workers="join:4", pool_listen=door, kv_replicas=2, **settings)
engine = llm.llm_engine
changes = engine.membership.changes  # counts of R-workers that joined, left or were lost

# %% Before step 6 the cloud sends the first host SIGTERM, a notice; before step 12 it takes the second without notice.
CLOUD = {6: hosts[0].terminate, 12: hosts[1].kill}


def generate(cloud: dict[int, Callable[[], None]]) -> list[str]:
    """Return the texts of all prompts. ``cloud``: functions to call before steps, by the step's number."""
    texts: dict[str, str] = {}
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    for num_steps in itertools.count(1):
        if not engine.has_unfinished_requests():
            return [texts[str(number)] for number in range(len(prompts))]
        cloud.get(num_steps, lambda: None)()
        for output in engine.step():
            texts[output.request_id] = output.outputs[0].text
    return []


def look_until(happened: Callable[[], bool]) -> None:
    """Let an idle engine check for hosts that leave or join, until ``happened`` returns True."""
    while not happened():
        engine.look_around()
        time.sleep(0.02)


disturbed = generate(CLOUD)
look_until(lambda: changes.left > 0 and changes.lost > 0)
print(f"{changes.left} R-worker left, {changes.lost} lost")

# %% A new host joins, and gets a part of the sequences when the same requests run again.
num_joined = changes.joined
hosts.append(new_host())
look_until(lambda: changes.joined > num_joined)
quiet = generate({})
num_same = sum(map(str.__eq__, disturbed, quiet))
print(f"{changes.joined - num_joined} joined; {num_same} of {len(quiet)} texts are the same")
llm.close()
signal.alarm(0)
