"""The models of a round, and the answers of one undisturbed R-worker to its requests."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from helpers import latent_zoo, model_zoo, sparse_zoo, tiny_hybrids

from chaos.configuration import DEMO, HYBRIDS, SPARSE, Ask, Configuration
from fastdecode import SamplingParams
from fastdecode.api.config import EngineConfig
from fastdecode.api.outputs import CompletionOutput, RequestOutput
from fastdecode.api.structured_outputs import StructuredOutputsParams
from fastdecode.cluster.r_worker.host import block_bytes
from fastdecode.engine.engine import LLMEngine

LONG_POSITIONS = 4096
ALONE = (
    "dtype", "kv_cache_dtype", "block_size", "max_model_len", "latent_absorption", "mamba_ssm_cache_dtype",
    "quantization",
    "int8_calibration_tokens",
)  # fmt: skip
"""Settings that the reference shares with the round."""

ROUNDING = 1e-5
"""Greatest difference of two logarithms of probabilities that another order of float32 additions can swap."""


@dataclass(frozen=True)
class Answer:
    """One completion: its tokens, its text and its finish reason.
    ``ties``: by place, the tokens that are as probable as the chosen token, except for rounding.
    """

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    ties: dict[int, list[int]] = field(default_factory=dict)

    def tie_of(self, tokens: tuple[int, ...]) -> int | None:
        """Return the place from which ``tokens`` differ, if they choose a token of ``ties`` there; else None."""
        pairs = enumerate(zip(self.tokens, tokens, strict=False))
        first = next((place for place, (wanted, found) in pairs if wanted != found), None)
        is_tie = first is not None and tokens[first] in self.ties.get(first, ())
        return first if is_tie and len(tokens) == len(self.tokens) else None


Answers = dict[int, list[Answer]]
"""The completions of each answered request."""


@dataclass(frozen=True)
class Reference:
    """The reference: its answers, its number of steps, and the bytes of a cache block and of weights on R-workers."""

    answers: Answers
    num_steps: int
    block_bytes: int
    weight_bytes: int

    def write(self, path: Path) -> None:
        """Write the reference as JSON for another process."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Reference:
        """Return the reference that ``write`` wrote."""
        told = json.loads(path.read_text())
        answers = {int(number): [_read_answer(each) for each in several] for number, several in told["answers"].items()}
        return cls(answers, told["num_steps"], told["block_bytes"], told["weight_bytes"])


def model_folder(name: str, drawn: Configuration, folder: Path) -> str:
    """Return the model in ``folder``, made on first use; for the package's model, its name."""
    if name == DEMO:
        return str(EngineConfig().model)
    is_long = drawn.settings["max_model_len"] > model_zoo.POSITIONS
    path = folder / (f"{name}-long" if is_long else name)
    if name in HYBRIDS and not path.exists():
        positions = LONG_POSITIONS if is_long else model_zoo.POSITIONS
        model = tiny_hybrids.built(name, vocab_size=model_zoo.VOCABULARY, max_position_embeddings=positions)
        model.save_pretrained(path)
    elif not path.exists():
        changes = {"max_position_embeddings": LONG_POSITIONS} if is_long else {}
        zoo = next((zoo for zoo in (latent_zoo, sparse_zoo) if name in zoo.CONFIGS), model_zoo)
        zoo.build_model(name, **changes).save_pretrained(path)
    return str(path)


def engine_config(drawn: Configuration, folder: Path, **settings: Any) -> EngineConfig:
    """Return ``settings`` of an engine for the round's model. Raise ConfigError if they conflict."""
    name = drawn.architecture
    common: dict[str, Any] = {"model": model_folder(name, drawn, folder), "device": "cpu", "s_threads": 1}
    common |= {"skip_tokenizer_init": name != DEMO}
    drafts = settings.get("speculative_config", {})
    if "model" in drafts:
        settings["speculative_config"] = drafts | {"model": model_folder(drafts["model"], drawn, folder)}
    return EngineConfig(**common | settings)


def compute_reference(drawn: Configuration, folder: Path) -> Reference:
    """Return the answers of one undisturbed R-worker."""
    settings = {name: drawn.settings[name] for name in ALONE if name in drawn.settings}
    more = {"r_workers": "inproc:1", "r_threads": 1, "kv_cache_memory": "256MiB", "schedule": "stall-free"}
    engine = LLMEngine(engine_config(drawn, folder, **settings, **more))
    try:
        wanted: Answers = {}
        for number, ask in enumerate(drawn.asks):
            params = params_of(ask)
            if adds_in_another_order(drawn) and params.temperature == 0:
                params = replace(params, logprobs=4)  # for ties
            engine.add_request(str(number), prompt_of(ask), params)
        num_steps = 0
        while engine.has_unfinished_requests():
            take(engine.step(), wanted)
            num_steps += 1
        layout = engine.s_model.layout
        return Reference(wanted, num_steps, block_bytes(layout, engine.config.block_size), layout.weight_bytes)
    finally:
        engine.close()


def prompt_of(ask: Ask) -> Any:
    """Return the request's prompt in the engine's form."""
    return ask.prompt if isinstance(ask.prompt, str) else {"prompt_token_ids": ask.prompt}


def params_of(ask: Ask) -> SamplingParams:
    """Return the request's sampling parameters."""
    form = ask.params.get("structured_outputs")
    more = {"structured_outputs": StructuredOutputsParams(**form)} if form else {}
    return SamplingParams(**ask.params | more)


def take(outputs: list[RequestOutput], found: Answers) -> None:
    """Store the newest outputs in ``found``."""
    for output in outputs:
        found[int(output.request_id)] = [
            Answer(tuple(each.token_ids), each.text, each.finish_reason, ties_of(each)) for each in output.outputs
        ]


def adds_in_another_order(drawn: Configuration) -> bool:
    """Return whether the engine of ``drawn`` adds float32 numbers in another order than the reference.
    Ranks add partial sums. Ranges of a model with an index add scores.
    """
    return drawn.kind == "ranks" or (drawn.architecture in SPARSE and "kv_shard_tokens" in drawn.settings)


def ties_of(completion: CompletionOutput) -> dict[int, list[int]]:
    """Return the ties of ``completion``, if it has logprobs: see ``Answer``."""
    ties: dict[int, list[int]] = {}
    for place, probable in enumerate(completion.logprobs or ()):
        chosen = completion.token_ids[place]
        least = probable[chosen].logprob - ROUNDING
        others = [token for token, each in probable.items() if token != chosen and each.logprob >= least]
        if others:
            ties[place] = others
    return ties


def _read_answer(told: dict[str, Any]) -> Answer:
    ties = {int(place): others for place, others in told["ties"].items()}
    return Answer(tuple(told["tokens"]), told["text"], told["finish_reason"], ties)
