"""The engine's settings: one field per flag, with its default, its bounds and its help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fastdecode.api.settings import SECURITY_LEVELS, setting
from fastdecode.core.types import ISAS, PREFILL_METHODS

MOST_SECONDS = 86400
DEMO_MODEL = Path(__file__).parents[1] / "demo_model"
"""The byte-level model that ships with the package."""

DTYPES = ("auto", "float32", "float16", "bfloat16")
KV_CACHE_DTYPES = (*DTYPES, "int8", "int4")
PACKED_FORMATS = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4", "torchao")
QUANTIZATIONS = ("int4", "int8", "unpack", *PACKED_FORMATS)
DEVICES = ("auto", "cpu", "cuda")
SCHEDULE_NAMES = ("sls", "stall-free", "fcfs", "request-level", "hybrid", "prefill-first")
BLOCK_SIZES = (16, 32, 64, 128, 256)

MAX_THREADS = 1024
"""Most threads of one worker; a higher number is taken for a typing error."""

MAX_SEATS = 1 << 20
"""Most sequences that may run at the same time; a higher number is taken for a typing error."""

MAX_RANKS = 1024
"""Most S-worker processes over which one model may be split; a higher number is taken for a typing error."""

MODEL, BATCHING, WORKERS = "model", "batching", "S-worker and R-workers"
"""Names of the groups of flags in ``--help-all``."""


@dataclass(frozen=True)
class EngineFields:
    """One field per engine flag, with underscores; None means "choose for me"."""

    model: str = setting(str(DEMO_MODEL), "", MODEL, metavar="PATH_OR_ID", unset="the demo model")
    tokenizer: str | None = setting(None, "", MODEL, metavar="PATH_OR_ID", unset="the model's")
    revision: str | None = setting(None, "branch, tag or commit of a model id", MODEL, unset="the newest")
    trust_remote_code: bool = setting(False, "run code that comes with the model", MODEL)
    skip_tokenizer_init: bool = setting(False, "prompts are token ids, outputs too", MODEL)
    load_format: str = setting("auto", "dummy: random weights", MODEL, choices=("auto", "dummy"))
    model_impl: str = setting(
        "auto", "library whose model code computes all but attention; vllm: by its kernels, with packed weights left "
        "packed (pip install 'fastdecode[vllm]')", MODEL, choices=("auto", "transformers", "vllm"),
        unset="auto: transformers",
    )  # fmt: skip
    lora_modules: list[str] = setting(
        list, "a LoRA adapter that is merged into the weights as they are loaded; it is served as NAME", MODEL,
        metavar="NAME=FOLDER", unset="none",
    )  # fmt: skip
    generation_config: str = setting(
        "auto", "where the sampling defaults of requests come from: auto, the model's generation_config.json; vllm, "
            "nowhere; or a folder with such a file", MODEL, metavar="FOLDER",
    )  # fmt: skip
    override_generation_config: dict[str, Any] = setting(
        dict, "sampling defaults to replace", MODEL, metavar="JSON", unset="none"
    )
    hf_overrides: dict[str, Any] = setting(dict, "configuration keys to replace", MODEL, metavar="JSON", unset="none")
    dtype: str = setting("auto", "of the weights", MODEL, choices=DTYPES, unset="auto: the model's")
    quantization: str | None = setting(
        None, "on the CPU, int8: linear layers multiply int8 weights and rows; about twice as fast as bfloat16, and a "
        "token's bits depend on nothing that runs beside it. On a GPU, int4 or int8: torchao packs plain weights. "
        "A packed checkpoint's own format keeps it packed; unpack does not", MODEL, metavar="METHOD",
        unset="none: packed checkpoints stay packed on a GPU and are unpacked on the CPU",
    )  # fmt: skip
    device: str = setting(
        "auto", "of the S-worker", MODEL, choices=DEVICES, unset="auto: cuda where there is a GPU, else cpu"
    )
    enforce_eager: bool = setting(False, "on a GPU, decode without CUDA graphs", MODEL)
    max_model_len: int | None = setting(
        None, "longest prompt + output", MODEL, metavar="TOKENS", unset="the model's", least=1
    )
    max_num_seqs: int = setting(256, "sequences in flight", BATCHING, metavar="N", least=1, most=MAX_SEATS)
    num_mini_batches: int | None = setting(
        None, "that take turns", BATCHING, metavar="K", unset="auto: 2 where an R-worker has its own cores, else 1",
        least=1,
    )  # fmt: skip
    max_num_batched_tokens: int = setting(2048, "token budget of a whole step", BATCHING, metavar="TOKENS", least=1)
    block_size: int = setting(32, "tokens per KV block", BATCHING, choices=BLOCK_SIZES)
    kv_cache_dtype: str = setting("auto", "", BATCHING, choices=KV_CACHE_DTYPES, unset="auto: the model's")
    mamba_ssm_cache_dtype: str = setting(
        "auto", "of the states of recurrent layers", BATCHING, choices=DTYPES, unset="auto: float32"
    )
    state_on: str = setting(
        "auto", "who keeps the states of recurrent layers: the R-workers, or the S-worker, which needs memory for "
        "those of all --max-num-seqs; `fastdecode plan` says what is better", BATCHING, choices=("auto", "r", "s"),
        unset="auto: r",
    )  # fmt: skip
    state_memory: int | str | None = setting(
        None, "with --state-on s, for the states of all sequences and of prefixes, such as 4GiB", BATCHING,
        metavar="BYTES", unset="40 % of what is free once the model is loaded",
    )  # fmt: skip
    latent_absorption: str = setting(
        "auto", "who multiplies K and V of latent attention (MLA) with queries and outputs: the S-worker, or the "
            "R-workers, which then hold K and V and receive less data; prefill workers multiply their own", BATCHING,
        choices=("s", "r", "auto"),
        unset="auto: s, or r where --profile has measured that it answers sooner",
    )  # fmt: skip
    kv_cache_memory: int | str | None = setting(
        None, "per R-worker, such as 4GiB", BATCHING, metavar="BYTES", unset="40 % of what is free, shared",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, "reuse the KV of equal beginnings", BATCHING, unset="on; off for the random dataset"
    )
    schedule: str = setting(
        "sls", "load-stabilizing and stall-free, or one to compare it with", BATCHING, choices=SCHEDULE_NAMES
    )
    kv_load_limit: int | None = setting(
        None, "KV tokens attended per step, over all R-workers", BATCHING, metavar="TOKENS", least=1,
        unset="auto: where R time equals S time, by --profile, in simulations by the model, or as measured in the "
        "first steps",
    )  # fmt: skip
    kv_shard_tokens: int | None = setting(
        None, "a longer sequence lies in ranges of so many tokens, each on an R-worker of its own: 512 times a power "
        "of two", BATCHING, metavar="TOKENS", least=1,
        unset="auto: what takes an R-worker longer to read than S time, by --profile; else as many as fit where no "
        "R-worker holds a sequence of max_model_len, and otherwise no ranges",
    )  # fmt: skip
    kv_replicas: int = setting(
        1, "R-workers that each sequence is cached on: with 2 a lost R-worker costs nothing but its speed, and either "
        "attends, in each step the one with less to do", BATCHING, choices=(1, 2),
    )  # fmt: skip
    micro_batch_interval: int | None = setting(
        None,
        "between the starts that sls spreads",
        BATCHING,
        metavar="STEPS",
        unset="auto: a 32nd of an output",
        least=1,
    )
    tbt_target: float | None = setting(
        None, "time between tokens that prompts may cause: sls and stall-free lower the token budget to meet it",
        BATCHING, metavar="SECONDS", unset="none",
    )  # fmt: skip
    prefill_scratch: int | str | None = setting(
        None, "KV of prompts in progress on the S-worker", BATCHING, metavar="BYTES",
        unset="an eighth of what is free; none where R-workers share its cores: prompts attend on them then",
    )  # fmt: skip
    profile: str | None = setting(
        None, "what `fastdecode calibrate` measured here: gives the load limit and step times", BATCHING,
        metavar="FILE", unset="none",
    )  # fmt: skip
    r_workers: str = setting(
        "inproc", "inproc:N, in this process; spawn:N, processes here; host:port,host:port, listening R-workers; "
        "join:N, those that join at --pool-listen, N to begin with; mpi, the other ranks of this mpirun; ray:N, actors "
        "of a Ray cluster (ray:N:strict-spread: one a node)", WORKERS,
        metavar="SPEC",
    )  # fmt: skip
    r_threads: int | None = setting(
        None, "per R-worker", WORKERS, metavar="N", unset="its cores", least=1, most=MAX_THREADS
    )
    tensor_parallel_size: int = setting(
        1, "S-worker processes that share the model, each with R-workers of its own: inproc:N and spawn:N are for "
        "each, host:port,host:port are dealt to them in order", WORKERS, metavar="N", least=1, most=MAX_RANKS,
    )  # fmt: skip
    s_threads: int | None = setting(None, "", WORKERS, metavar="N", unset="its cores", least=1, most=MAX_THREADS)
    s_cores: str | None = setting(
        None, "such as 0,2-3", WORKERS, metavar="LIST", unset="every core; of spawn, what --r-cores leaves"
    )
    r_cores: str | None = setting(None, "such as 4-7", WORKERS, metavar="LIST", unset="every core")
    prefill_workers: str | None = setting(
        None, "that compute prompts: spawn:N, processes here; host:port,host:port, listening ones; mpi:N, ranks of "
        "this mpirun", WORKERS, metavar="SPEC", unset="none: the S-worker does",
    )  # fmt: skip
    prefill_parallel: str = setting(
        "kvr", "how they share a prompt: kvr, a chain (KV-Runahead); tsp, for comparison", WORKERS,
        choices=PREFILL_METHODS,
    )  # fmt: skip
    prefill_threads: int | None = setting(
        None, "per spawned prefill worker", WORKERS, metavar="N", unset="its share of the cores", least=1,
        most=MAX_THREADS,
    )  # fmt: skip
    prefill_cores: str | None = setting(
        None, "of spawned prefill workers, dealt in turn, such as 4-7", WORKERS, metavar="LIST", unset="every core"
    )
    speculative_config: dict[str, Any] = setting(
        dict, 'draft tokens that R-workers verify over one read of the cache, such as {"method": "ngram", '
        '"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}', BATCHING, metavar="JSON",
        unset="none",
    )  # fmt: skip
    pool_listen: str | None = setting(
        None, "where R-workers may join while the job runs", WORKERS, metavar="HOST:PORT", unset="nowhere"
    )
    key_file: str | None = setting(
        None, "secret shared with R-workers at host:port, mode 0600", WORKERS, metavar="FILE", unset="none"
    )
    security: str | None = setting(
        None, "with --key-file, alike on both sides: authenticate is faster, and whatever listens on the network can "
        "read all", WORKERS, choices=SECURITY_LEVELS, unset="encrypt",
    )  # fmt: skip
    silence_seconds: float = setting(
        1.5, "an R-worker that gives no sign of life for so long is lost", WORKERS, metavar="SECONDS"
    )
    wait_for_r_workers: float = setting(
        30.0, "once the last R-worker is lost, how long to wait until it, or another, comes; 0: not at all", WORKERS,
        metavar="SECONDS",
    )  # fmt: skip
    park_dir: str | None = setting(
        None, "folder where R-workers of inproc and spawn store prefixes that are not used, and read them back, also "
            "after a restart; other R-workers have their own --park-dir", WORKERS, metavar="DIR", unset="nowhere",
    )  # fmt: skip
    park_after: float | None = setting(
        None, "without use, after which a prefix is parked", WORKERS, metavar="SECONDS", unset="60"
    )
    park_bytes: int | str | None = setting(
        None, "most on the disk, per R-worker, such as 100GiB; the least recently used are deleted first", WORKERS,
        metavar="BYTES", unset="half of what is free there",
    )  # fmt: skip
    uniform_arithmetic: str = setting(
        "auto", "instruction set with which all R-workers compute attention, so that results do not depend on the "
            "R-worker", WORKERS,
        choices=("auto", *ISAS), unset="auto: each in its fastest",
    )  # fmt: skip
    audit: float = setting(
        0.0, "share of the rows of attention that are computed again elsewhere and compared bit for bit, such as 0.01: "
            "an R-worker that computes wrong, or whose memory changes, is named and dropped", WORKERS,
        metavar="FRACTION", unset="0: none",
    )  # fmt: skip
    journal: str | None = setting(
        None, "folder for requests and the tokens of each step, or r-workers: in the memory of two R-workers, with "
            "--keep-session. A later engine that is started with the same folder continues the requests that clients "
            "send again", WORKERS, metavar="DIR", unset="none",
    )  # fmt: skip
    session: str | None = setting(
        None, "name under which R-workers at host:port serve this S-worker: one that is started with it after this one "
        "takes its place, and this one then ends", WORKERS, metavar="NAME", unset="none",
    )  # fmt: skip
    keep_session: float = setting(
        0.0, "with --session and --journal, how long R-workers keep sequences once the S-worker is gone, so that the "
        "next one need not compute them again", WORKERS, metavar="SECONDS",
    )  # fmt: skip
    trace: str | None = setting(None, "write Chrome trace events", WORKERS, metavar="FILE", unset="none")
    seed: int = 0
    stands_by: bool = False
    """True: the engine loads the weights, then waits until the S-worker that has ``session`` is gone."""
