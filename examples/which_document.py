"""Find out which of twenty documents an answer is based on, from the attention of its tokens.

``python examples/which_document.py "$(fastdecode get-model)" PICTURE``: a chat model's folder, and a file to draw.
R-workers compute attention beside the cache, so they can tell to which tokens each token of an answer attended.
"""

from __future__ import annotations

import signal
import sys
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np

from fastdecode import LLM, SamplingParams

# %% Twenty documents, as a retriever would find them.
FACTS = [
    ("Aurora", "The bakery Aurora in Turku opens at 6 and is known for its cardamom buns."),
    ("Bramble", "Bramble is a bicycle workshop in Leeds that repairs old hub gears."),
    ("Cobalt", "The research ship Cobalt left Bergen with a crew of 31."),
    ("Dunlin", "Dunlin is a lighthouse whose lamp was replaced in 1994."),
    ("Ember", "The theatre Ember in Ghent seats 212 people."),
    ("Fennel", "Fennel is a village choir that sings on Thursdays."),
    ("Granite", "The quarry Granite near Ulm closed after a flood in 2003."),
    ("Harbour", "The hotel Harbour in Porto has a garden on its roof."),
    ("Indigo", "Indigo is a dye works whose owner is Marta Lindqvist."),
    ("Juniper", "The mountain hut Juniper is open from June to September."),
    ("Kestrel", "Kestrel is a night train from Vienna to Zagreb."),
    ("Lantern", "The bookshop Lantern in Galway sells maps and sea charts."),
    ("Meadow", "Meadow is a school garden with 40 beehives."),
    ("Nimbus", "The observatory Nimbus in Jena has a mirror of 2 metres."),
    ("Orchard", "Orchard is a cider mill that was built in 1887."),
    ("Pebble", "The ferry Pebble crosses the fjord in 12 minutes."),
    ("Quartz", "Quartz is a watchmaker in Besançon who teaches apprentices."),
    ("Raven", "The museum Raven in Riga shows old printing presses."),
    ("Sable", "Sable is a violin that was made in Cremona in 1721."),
    ("Thistle", "The tea room Thistle in Perth bakes scones with nettles."),
]
QUESTION = "Who is the owner of the dye works Indigo? Answer in one sentence."
GREETING = "Say good morning, and nothing else."
DOCUMENTS = [f"Document {number}: {text}\n" for number, (_, text) in enumerate(FACTS, 1)]


# %% The conversation as tokens, and the document of each token; -1 for tokens outside all documents.
def read_prompt(tokenizer: Any, question: str) -> tuple[list[int], list[int]]:
    """Return the prompt's tokens, and for each token the number of its document, or -1."""
    messages = [{"role": "user", "content": f"{''.join(DOCUMENTS)}\n{question}"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    first = text.index(DOCUMENTS[0])
    ends = list(accumulate(map(len, DOCUMENTS), initial=first))
    numbers = [bisect_right(ends, begin) - 1 for begin, _ in encoded["offset_mapping"]]
    return encoded["input_ids"], [number if number < len(DOCUMENTS) else -1 for number in numbers]


# %% Sources are reported in blocks of one token, so that each block belongs to one document.
def shares_of(sources: Sequence[Sequence[Any]], documents: Sequence[int]) -> np.ndarray:
    """Return each answer token's attention per document, float64 [tokens, documents]; each row sums to 1."""
    shares = np.zeros((len(sources), len(DOCUMENTS)))
    for row, blocks in zip(shares, sources, strict=True):
        for block in blocks:
            if block.first < len(documents) and documents[block.first] >= 0:
                row[documents[block.first]] += block.weight
    return shares / shares.sum(1, keepdims=True)


# %% Models attend to some tokens by habit, such as the first. A greeting shows the habit, which is then subtracted.
def ask(llm: LLM, question: str) -> tuple[str, list[str], np.ndarray]:
    """Return the answer, its tokens' texts, and each token's attention per document."""
    token_ids, documents = read_prompt(llm.get_tokenizer(), question)
    params = SamplingParams(temperature=0, max_tokens=24, attention_sources=1024, attention_source_block=1)
    (output,) = llm.generate([{"prompt_token_ids": token_ids}], params, use_tqdm=False)
    answer = output.outputs[0]
    words = [repr(llm.get_tokenizer().decode([token]))[1:-1] for token in answer.token_ids]
    return answer.text.strip(), words, shares_of(answer.attention_sources, documents)


# %% A picture: a row per answer token, and bars with the mean of all rows.
def draw(shares: np.ndarray, words: Sequence[str], path: str) -> None:
    """Draw the attention per document. matplotlib comes with ``pip install 'fastdecode[plot]'``."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (bars, strip) = pyplot.subplots(
        2, 1, figsize=(9, 1.9 + 0.24 * len(words)), sharex=True, height_ratios=[1.5, 0.24 * len(words)],
        layout="constrained",
    )  # fmt: skip
    mean = shares.mean(0)
    bars.bar(range(len(mean)), mean, color=["#d97f1f" if each == mean.max() else "#2f6db3" for each in mean])
    bars.set_ylabel("mean share\nabove habit")
    bars.set_title("Which documents the answer looked at")
    bars.spines[["top", "right"]].set_visible(False)
    strip.imshow(shares.clip(0), aspect="auto", cmap="Blues", vmin=0)
    strip.set_yticks(range(len(words)), words, fontsize=8)
    strip.set_xticks(range(len(mean)), [f"{n} {name}" for n, (name, _) in enumerate(FACTS, 1)], rotation=60, ha="right")
    figure.savefig(path, dpi=130)


# %% Ask, draw the picture, and print a table.
def main(model: str, path: str) -> None:
    with LLM(model, dtype="float32", max_model_len=2048, kv_cache_memory="256MiB") as llm:
        _, _, habit = ask(llm, GREETING)
        text, words, shares = ask(llm, QUESTION)
    above = shares - habit.mean(0)
    draw(above, words, path)
    print(f"{QUESTION}\n{text}\n\n share  above habit  document")
    for number in np.argsort(-above.mean(0)):
        print(f"{shares.mean(0)[number]:6.1%}  {above.mean(0)[number]:+11.1%}  {DOCUMENTS[number].strip()}")
    print(f"\ndrawn in {path}")


if __name__ == "__main__":
    signal.signal(signal.SIGALRM, lambda *_: sys.exit("no end within 5 minutes: see `fastdecode doctor`"))
    signal.alarm(300)
    if not sys.argv[1:]:
        sys.exit("give a chat model's folder, as that which `fastdecode get-model` prints")
    main(sys.argv[1], (*sys.argv[2:], "which_document.png")[0])
    signal.alarm(0)
