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

    model: str = setting(
        str(DEMO_MODEL), "model folder, GGUF file, or id on the Hugging Face hub", MODEL, metavar="PATH_OR_ID",
        unset="the demo model",
    )  # fmt: skip
    tokenizer: str | None = setting(
        None, "folder or hub id of the tokenizer", MODEL, metavar="PATH_OR_ID", unset="the model's"
    )
    revision: str | None = setting(None, "branch, tag or commit of the model on the hub", MODEL, unset="the newest")
    trust_remote_code: bool = setting(False, "run Python code that comes with the model", MODEL)
    skip_tokenizer_init: bool = setting(False, "load no tokenizer: prompts and outputs are token ids", MODEL)
    load_format: str = setting(
        "auto", "how to load the weights; dummy: make random weights", MODEL, choices=("auto", "dummy")
    )
    model_impl: str = setting(
        "auto", "library whose code computes the layers, attention apart; vllm: vLLM's kernels, which "
            "read packed weights (needs fastdecode[vllm])", MODEL, choices=("auto", "transformers", "vllm"),
        unset="auto: transformers",
    )  # fmt: skip
    lora_modules: list[str] = setting(
        list, "one LoRA adapter, which is merged into the weights and served as NAME", MODEL,
        metavar="NAME=FOLDER", unset="none",
    )  # fmt: skip
    generation_config: str = setting(
        "auto", "source of the default sampling parameters: auto, the model's generation_config.json; "
            "vllm, none; or a folder with such a file", MODEL, metavar="FOLDER",
    )  # fmt: skip
    override_generation_config: dict[str, Any] = setting(
        dict, "default sampling parameters that replace those of generation_config.json", MODEL, metavar="JSON",
        unset="none",
    )  # fmt: skip
    hf_overrides: dict[str, Any] = setting(
        dict, "keys of the model's configuration to replace", MODEL, metavar="JSON", unset="none"
    )
    dtype: str = setting("auto", "dtype of the weights", MODEL, choices=DTYPES, unset="auto: the model's")
    quantization: str | None = setting(
        None, "on the CPU, int8: linear layers multiply int8 weights and activations, about twice as "
            "fast as bfloat16. On a GPU, int8 or int4: torchao packs plain weights. The name of a "
            "packed checkpoint's format keeps the weights packed; unpack unpacks them", MODEL, metavar="METHOD",
        unset="none: packed checkpoints stay packed on a GPU and are unpacked on the CPU",
    )  # fmt: skip
    int8_calibration_tokens: int = setting(
        0, "with --quantization int8 on the CPU, round weights so that their errors cancel out on this many random "
        "tokens, such as 1024. This avoids a third of the loss of quality; loading takes minutes per billion weights",
        MODEL, metavar="N", least=0, most=8192, unset="0: round to nearest",
    )  # fmt: skip
    device: str = setting(
        "auto", "device of the S-worker", MODEL, choices=DEVICES, unset="auto: cuda where there is a GPU, else cpu"
    )
    enforce_eager: bool = setting(False, "on a GPU, decode without CUDA graphs", MODEL)
    max_model_len: int | None = setting(
        None, "most tokens of prompt and output together", MODEL, metavar="TOKENS", unset="the model's", least=1
    )
    max_num_seqs: int = setting(
        256, "most sequences that run at the same time", BATCHING, metavar="N", least=1, most=MAX_SEATS
    )
    num_mini_batches: int | None = setting(
        None, "mini-batches of a step, which take turns: one computes while the R-workers attend for "
            "another", BATCHING, metavar="K", unset="auto: 2 where an R-worker has its own cores, else 1",
        least=1,
    )  # fmt: skip
    max_num_batched_tokens: int = setting(
        2048, "most tokens of one step, over all sequences", BATCHING, metavar="TOKENS", least=1
    )
    block_size: int = setting(32, "tokens of one KV cache block", BATCHING, choices=BLOCK_SIZES)
    kv_cache_dtype: str = setting(
        "auto", "dtype of the KV cache", BATCHING, choices=KV_CACHE_DTYPES, unset="auto: the model's"
    )
    mamba_ssm_cache_dtype: str = setting(
        "auto", "dtype of recurrent layers' states", BATCHING, choices=DTYPES, unset="auto: float32"
    )
    state_on: str = setting(
        "auto", "where the states of recurrent layers are kept: r, on the R-workers; s, on the S-worker, "
            "whose memory must then hold the states of --max-num-seqs sequences", BATCHING, choices=("auto", "r", "s"),
        unset="auto: r",
    )  # fmt: skip
    state_memory: int | str | None = setting(
        None, "with --state-on s: memory for the states of sequences and prefixes, such as 4GiB", BATCHING,
        metavar="BYTES", unset="40 % of what is free once the model is loaded",
    )  # fmt: skip
    latent_absorption: str = setting(
        "auto", "with latent attention (MLA), where the K and V projections are multiplied: s, on the "
            "S-worker; r, on the R-workers, which then hold these weights and receive less data", BATCHING,
        choices=("s", "r", "auto"),
        unset="auto: s, or r where --profile shows that r is faster",
    )  # fmt: skip
    kv_cache_memory: int | str | None = setting(
        None, "memory of each R-worker's KV cache, such as 4GiB", BATCHING, metavar="BYTES",
        unset="40 % of the free memory, shared by the R-workers here",
    )  # fmt: skip
    enable_prefix_caching: bool = setting(
        True, "reuse the KV cache of prompts that begin with the same tokens", BATCHING,
        unset="on; off for the random dataset",
    )  # fmt: skip
    schedule: str = setting(
        "sls", "scheduling policy; sls is load-stabilizing and stall-free", BATCHING, choices=SCHEDULE_NAMES
    )
    kv_load_limit: int | None = setting(
        None, "most KV tokens attended in one step, over all R-workers", BATCHING, metavar="TOKENS", least=1,
        unset="auto: the load at which R-workers take as long as the S-worker, by --profile or "
            "measured in the first steps",
    )  # fmt: skip
    kv_shard_tokens: int | None = setting(
        None, "most tokens of one range: the KV cache of a longer sequence is split into ranges on "
            "different R-workers; 512 times a power of two", BATCHING, metavar="TOKENS", least=1,
        unset="auto: by --profile, so that no range takes longer to read than the S-worker computes; "
            "without a profile, only if no R-worker can hold a sequence of max_model_len",
    )  # fmt: skip
    kv_replicas: int = setting(
        1, "copies of each sequence's KV cache, on different R-workers; with 2, the loss of an "
            "R-worker needs no recomputing", BATCHING, choices=(1, 2),
    )  # fmt: skip
    micro_batch_interval: int | None = setting(
        None, "steps between two micro-batches of new sequences, with schedule sls", BATCHING, metavar="STEPS",
        unset="auto: 1/32 of the mean output length", least=1,
    )  # fmt: skip
    tbt_target: float | None = setting(
        None, "target for the time between two tokens; sls and stall-free compute fewer prompt tokens "
            "per step to meet it",
        BATCHING, metavar="SECONDS", unset="none",
    )  # fmt: skip
    prefill_scratch: int | str | None = setting(
        None, "memory of the S-worker for the keys and values of prompts in progress", BATCHING, metavar="BYTES",
        unset="1/8 of the free memory; 0 if R-workers share the S-worker's cores: R-workers then "
            "attend for prompts too",
    )  # fmt: skip
    profile: str | None = setting(
        None, "hardware profile from `fastdecode calibrate`, for the load limit and step times", BATCHING,
        metavar="FILE", unset="none",
    )  # fmt: skip
    r_workers: str = setting(
        "inproc", "R-workers, which hold the KV cache: inproc:N, in this process; spawn:N, new processes "
            "here; host:port,host:port, listening R-workers; join:N, wait for N at --pool-listen; "
            "mpi, the other ranks of this MPI job; ray:N[:strict-spread], actors of a Ray cluster", WORKERS,
        metavar="SPEC",
    )  # fmt: skip
    r_threads: int | None = setting(
        None, "threads of each R-worker", WORKERS, metavar="N", unset="one per core of the R-worker", least=1,
        most=MAX_THREADS,
    )  # fmt: skip
    tensor_parallel_size: int = setting(
        1, "processes over which the S-worker is split. Each has its own R-workers: N of inproc:N "
            "or spawn:N, or an equal share of the addresses, in order", WORKERS, metavar="N", least=1, most=MAX_RANKS,
    )  # fmt: skip
    s_threads: int | None = setting(
        None, "threads of the S-worker", WORKERS, metavar="N", unset="one per core of the S-worker", least=1,
        most=MAX_THREADS,
    )  # fmt: skip
    s_cores: str | None = setting(
        None, "cores of the S-worker, such as 0,2-3", WORKERS, metavar="LIST",
        unset="every core; with spawn, the cores that --r-cores leaves",
    )  # fmt: skip
    r_cores: str | None = setting(
        None, "cores of the R-workers on this machine, such as 4-7", WORKERS, metavar="LIST", unset="every core"
    )
    prefill_workers: str | None = setting(
        None, "prefill workers, which compute prompts: spawn:N, new processes here; "
            "host:port,host:port, listening ones; mpi:N, ranks of this MPI job", WORKERS, metavar="SPEC",
            unset="none: the S-worker computes prompts",
    )  # fmt: skip
    prefill_parallel: str = setting(
        "kvr", "how prefill workers share one prompt: kvr, as a chain (KV-Runahead); tsp, by tensor and "
            "sequence parallelism, for comparison", WORKERS,
        choices=PREFILL_METHODS,
    )  # fmt: skip
    prefill_threads: int | None = setting(
        None, "threads of each spawned prefill worker", WORKERS, metavar="N", unset="an equal share of the cores",
        least=1,
        most=MAX_THREADS,
    )  # fmt: skip
    prefill_cores: str | None = setting(
        None, "cores of spawned prefill workers, such as 4-7; each worker gets a share", WORKERS, metavar="LIST",
        unset="every core",
    )  # fmt: skip
    speculative_config: dict[str, Any] = setting(
        dict, 'speculative decoding: how to draft tokens, such as {"method": "ngram", '
            '"num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 1}', BATCHING, metavar="JSON",
        unset="none",
    )  # fmt: skip
    pool_listen: str | None = setting(
        None, "address at which R-workers may join the running job", WORKERS, metavar="HOST:PORT", unset="nowhere"
    )
    key_file: str | None = setting(
        None, "file with the secret that is shared with R-workers at host:port; mode 0600", WORKERS, metavar="FILE",
        unset="none",
    )  # fmt: skip
    security: str | None = setting(
        None, "with --key-file, the same on both sides: encrypt, or authenticate, which is faster but "
            "sends data in clear text", WORKERS, choices=SECURITY_LEVELS, unset="encrypt",
    )  # fmt: skip
    silence_seconds: float = setting(
        1.5, "seconds without a message after which an R-worker counts as lost", WORKERS, metavar="SECONDS"
    )
    wait_for_r_workers: float = setting(
        30.0, "seconds to wait for an R-worker after the last one was lost; 0: fail at once", WORKERS,
        metavar="SECONDS",
    )  # fmt: skip
    park_dir: str | None = setting(
        None, "folder in which R-workers of inproc and spawn store unused prefixes, to read them back "
            "later, even after a restart; other R-workers have their own --park-dir", WORKERS, metavar="DIR",
            unset="nowhere",
    )  # fmt: skip
    park_after: float | None = setting(
        None, "seconds without use after which a prefix is stored in --park-dir", WORKERS, metavar="SECONDS", unset="60"
    )
    park_bytes: int | str | None = setting(
        None, "most bytes that each R-worker stores in --park-dir, such as 100GiB; the least recently "
            "used files are deleted first", WORKERS,
        metavar="BYTES", unset="half of the free disk space",
    )  # fmt: skip
    uniform_arithmetic: str = setting(
        "auto", "instruction set that all R-workers use, so that results do not depend on the R-worker", WORKERS,
        choices=("auto", *ISAS), unset="auto: the fastest of each R-worker",
    )  # fmt: skip
    audit: float = setting(
        0.0, "share of the rows of attention that are computed again elsewhere and compared bit for bit, such as 0.01: "
            "an R-worker that computes wrong, or whose memory changes, is named and dropped", WORKERS,
        metavar="FRACTION", unset="0: none",
    )  # fmt: skip
    journal: str | None = setting(
        None, "folder that records requests and tokens, so that a later engine with the same folder "
            "continues requests that clients send again; r-workers: the memory of two R-workers, "
            "with --keep-session", WORKERS, metavar="DIR", unset="none",
    )  # fmt: skip
    session: str | None = setting(
        None, "name of this S-worker's session on R-workers at host:port; a second S-worker with the "
            "same name replaces this one", WORKERS, metavar="NAME", unset="none",
    )  # fmt: skip
    keep_session: float = setting(
        0.0, "with --session and --journal: seconds for which R-workers keep sequences after the "
            "S-worker ends, so that the next S-worker need not recompute them", WORKERS, metavar="SECONDS",
    )  # fmt: skip
    trace: str | None = setting(None, "file to write Chrome trace events to", WORKERS, metavar="FILE", unset="none")
    seed: int = 0
    stands_by: bool = False
    """True: the engine loads the weights, then waits until the S-worker that has ``session`` is gone."""
