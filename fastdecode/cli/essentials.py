"""The content of ``--help``: commands in groups, and the flags of a command that most users need."""

from __future__ import annotations

GROUPS = {
    "run": ("generate", "get-model"),
    "serve": ("serve", "run-batch"),
    "cluster": ("r-worker", "prefill-worker", "launch", "cache", "doctor", "collect-env"),
    "plan": ("plan", "simulate", "calibrate", "validate"),
    "measure": (
        "bench throughput", "bench latency", "bench serve", "bench attention", "bench perplexity", "bench prefill",
    ),
}  # fmt: skip
"""Every command, grouped by purpose."""

_MODEL = ("model", "dtype", "max_model_len")
_CACHE = ("kv_cache_memory", "kv_cache_dtype", "r_workers")
_LENGTHS = ("random_input_len", "random_output_len", "num_prompts", "request_rate")

ESSENTIAL = {
    "generate": ("max_tokens", "temperature", "top_p", "stop", "n", "chat", "json", *_MODEL, *_CACHE),
    "serve": (
        "host", "port", "api_key", "served_model_name", "tool_call_parser", "reasoning_parser", *_MODEL, "max_num_seqs",
        *_CACHE,
    ),
    "run-batch": (
        "input_file", "output_file", "served_model_name", "retry_failed", *_MODEL, "max_num_seqs", *_CACHE, "seed",
    ),
    "bench throughput": (
        "dataset_name", "dataset_path", *_LENGTHS, "output_json", "plot_timeline", "model", "max_num_seqs",
        "kv_cache_dtype", "schedule", "r_workers",
    ),
    "bench latency": ("input_len", "output_len", "batch_size", "num_iters", "output_json", *_MODEL, *_CACHE),
    "bench serve": (
        "backend", "base_url", "model", "tokenizer", "dataset_name", "dataset_path", *_LENGTHS, "max_concurrency",
        "goodput", "save_result",
    ),
    "bench attention": (
        "num_heads", "num_kv_heads", "head_dim", "context_len", "batch_size", "kv_cache_dtype", "threads", "isa",
        "q_len", "output", "output_json", "plot",
    ),
    "bench perplexity": ("text", "window", "output_json", *_MODEL, *_CACHE),
    "bench prefill": (
        "prefill_lens", "workers", "methods", "repeats", "output_json", "plot", *_MODEL, "r_workers",
    ),
    "calibrate": (
        "output", "quick", *_MODEL, "kv_cache_dtype", "r_workers", "key_file", "tensor_parallel_size",
        "prefill_workers",
    ),
    "plan": (
        "model", "gpu", "cpu", "link", "num_r_workers", "profile", "seq_len", "prompt_len", "mini_batch_size",
        "latency_limit", "kv_cache_dtype", "output_json", "emit",
    ),
    "simulate": (
        *_LENGTHS, "model", "gpu", "cpu", "link", "num_r_workers", "profile", "schedule", "events", "output_json",
    ),
    "r-worker": (
        "listen", "join", "threads", "cores", "kv_cache_memory", "key_file", "security", "park_dir", "health_listen",
    ),
    "prefill-worker": ("listen", "join", "threads", "cores", "key_file", *_MODEL, "device"),
}  # fmt: skip
"""Essential flags by command. A command that is not listed has few flags, and ``--help`` shows all of them."""

TEXTS = {
    "api_key": "key that requests must send",
    "chat": "format each prompt by the chat template",
    "dataset_path": "ShareGPT JSON, or JSONL with a prompt per line",
    "dtype": "weights as float32, float16 or bfloat16",
    "emit": "format to print in place of the plan",
    "events": "file of events, JSON lines",
    "format": "openmpi, mpich, srun, slurm or ssh",
    "health_listen": "address for /health and /metrics; port 0: any",
    "host": "address to listen at",
    "join": "address of an S-worker whose running job to join",
    "key_file": "file with the secret that both sides share",
    "kv_cache_memory": "KV cache, such as 4GiB",
    "kv_cache_dtype": "KV cache as float32, float16, bfloat16, int8 or int4",
    "link": "bandwidth of the S-worker's link",
    "model": "folder, GGUF file, or id on the Hugging Face hub",
    "park_after": "seconds without use before a prefix is stored",
    "park_bytes": "most bytes in --park-dir",
    "park_dir": "folder in which to store unused prefixes",
    "prefill_workers": "prefill workers, which compute prompts",
    "r_workers": "R-workers, which hold the KV cache",
    "reasoning_parser": "syntax of reasoning, such as qwen3",
    "schedule": "sls, stall-free, fcfs, request-level, hybrid or prefill-first",
    "security": "with --key-file: encrypt or authenticate",
    "served_model_name": "names by which clients request the model",
    "tool_call_parser": "syntax of tool calls, such as hermes",
    "top_p": "sample from this total probability",
}
"""Help texts by flag that ``--help`` shows in place of the longer ones of ``--help-all``."""
