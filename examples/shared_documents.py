"""Questions about the same document share its cache: python examples/shared_documents.py

Retrieval puts a document before each question. Tokens with which several prompts begin are computed once. A later
question reuses the document's blocks, and R-workers read these once for all questions that run at the same time.
"""

from __future__ import annotations

# %% Two documents. A retriever would find one of them for each question.
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
    """Return a prompt that begins with the document, since only beginnings of prompts are shared."""
    return f"{documents[document]}\n\n{question}\n    "


# %% Three questions about each document. Its tokens are computed with the first of them.
def ask(share: bool) -> tuple[list[str], int]:
    """Return the answers to all questions, and how many prompt tokens were computed."""
    computed: list[int] = []
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory": "64MiB", "r_workers": "inproc:2"}
    with LLM(enable_prefix_caching=share, **settings) as llm:
        llm.llm_engine.on_step = lambda record: computed.append(record.num_prompt_tokens)
        texts = []
        for question in questions:
            prompts = [prompt_of(document, question) for document in documents]
            texts += [output.outputs[0].text for output in llm.generate(prompts, params, use_tqdm=False)]
    return texts, sum(computed)


# %% The answers are the same with sharing. Later questions saved the computation of the documents' tokens.
shared, num_shared = ask(True)
alone, num_alone = ask(False)
print(f"{num_shared} tokens of prompts computed, {num_alone} without sharing: {num_shared / num_alone:.2f} of them")
print(f"{sum(map(str.__eq__, shared, alone))} of {len(alone)} answers are the same")
signal.alarm(0)
