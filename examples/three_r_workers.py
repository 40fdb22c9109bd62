"""Three R-workers hold the cache; one is killed, and no token differs: python examples/three_r_workers.py

Editors that support cells (`# %%`) can run each cell by itself.
"""

from __future__ import annotations

# %% R-workers are processes that listen. Here all run on this machine; in production each would have its own host.
import atexit
import os
import signal
import subprocess
import sys

from fastdecode import LLM, SamplingParams

# %% Whatever happens, the example ends after five minutes.
signal.signal(signal.SIGALRM, lambda *_: sys.exit("no end within 5 minutes: `fastdecode doctor` says what is wrong"))
signal.alarm(300)

COMMAND = [sys.executable, "-m", "fastdecode.cli.main", "r-worker", "--listen", "tcp://127.0.0.1:0", "--threads", "1"]
OWN = os.environ | {"PYTHONSAFEPATH": "1"}  # import the installed fastdecode, not this folder
processes = [
    subprocess.Popen([*COMMAND, "--kv-cache-memory", "64MiB"], stdout=subprocess.PIPE, text=True, env=OWN)
    for _ in range(3)
]
for process in processes:
    atexit.register(process.kill)
lines = [process.stdout.readline() if process.stdout else "" for process in processes]
addresses = [line.split("tcp://")[1].split()[0] for line in lines]
print(f"three R-workers, at {', '.join(addresses)}")

# %% Six requests, and their texts if no R-worker is lost.
prompts = [f"def {name}(self, path):\n    " for name in ("read", "write", "open", "close", "copy", "move")]
params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
settings = {"dtype": "float32", "max_model_len": 128}
with LLM(r_workers="inproc:1", kv_cache_memory="64MiB", **settings) as llm:
    undisturbed = [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]

# %% The same requests on the three R-workers, step by step. Before the tenth step, one R-worker is killed.
texts: dict[str, str] = {}
with LLM(r_workers=",".join(addresses), **settings) as llm:
    engine, num_steps, num_lost = llm.llm_engine, 0, []
    engine.on_step = lambda record: num_lost.append(record.lost_workers)
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), prompt, params)
    while engine.has_unfinished_requests():
        num_steps += 1
        if num_steps == 10:
            processes[1].kill()
        for output in engine.step():
            texts[output.request_id] = output.outputs[0].text

# %% The lost sequences were recomputed on the other two R-workers, and continue with the same text.
same = [texts[str(number)] == text for number, text in enumerate(undisturbed)]
print(f"{sum(num_lost)} R-worker lost in {num_steps} steps; {sum(same)} of {len(same)} texts as without the loss")
print(prompts[0] + undisturbed[0])
signal.alarm(0)
