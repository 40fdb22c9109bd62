"""Questions about the same documents share their cache: python examples/shared_documents.py

Retrieval puts a document before each question. Prompts that begin alike are computed once: a question that comes later
forks the blocks of the document, and R-workers read them once for all questions that run together.
"""

from __future__ import annotations

# %% Two documents, of which a retriever would find one for each question.
import inspect
import signal
import sys
import textwrap

from fastdecode import LLM, SamplingParams

# %% Whatever happens, the example ends after five minutes.
signal.signal(signal.SIGALRM, lambda *_: sys.exit("no end within 5 minutes: `fastdecode doctor` says what is wrong"))
signal.alarm(300)

documents = {each.__name__: inspect.getsource(each)[:600] for each in (textwrap.indent, inspect.getdoc)}
questions = ["def is_empty(text):", "def first_line(text):", "def num_words(text):"]
params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def prompt_of(document: str, question: str) -> str:
    """Put the document first, since only beginnings are shared."""
    return f"{documents[document]}\n\n{question}\n    "


# %% Each document is asked about three times; the first question of each computes it.
def ask(share: bool) -> tuple[list[str], int]:
    """Return the answers, and how many tokens of prompts were computed for them."""
    computed: list[int] = []
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory": "64MiB", "r_workers": "inproc:2"}
    with LLM(enable_prefix_caching=share, **settings) as llm:
        llm.llm_engine.on_step = lambda record: computed.append(record.num_prompt_tokens)
        texts = []
        for question in questions:
            prompts = [prompt_of(document, question) for document in documents]
            texts += [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    return texts, sum(computed)


# %% The answers are the same to the token. What was saved is the documents' tokens after the first question.
shared, num_shared = ask(True)
alone, num_alone = ask(False)
print(f"{num_shared} tokens of prompts computed, {num_alone} without sharing: {num_shared / num_alone:.2f} of them")
print(f"{sum(map(str.__eq__, shared, alone))} of {len(alone)} answers are the same")
signal.alarm(0)
