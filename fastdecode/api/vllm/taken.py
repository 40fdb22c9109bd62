"""Lists vLLM's settings and flags that FastDecode accepts with the same meaning."""

from __future__ import annotations

TAKEN = dict.fromkeys(
    (
        "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "block_size", "chat_template",
        "chat_template_content_format", "default_chat_template_kwargs", "disable_fastapi_docs",
        "enable_prefix_caching", "enable_request_id_headers", "enforce_eager", "generation_config", "hf_overrides",
        "host", "max_num_queued_reqs", "max_num_seqs", "model", "otlp_traces_endpoint", "override_generation_config",
        "port", "reasoning_parser", "revision", "root_path", "seed", "shutdown_timeout", "skip_tokenizer_init",
        "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers", "ssl_keyfile", "tensor_parallel_size",
        "tokenizer", "tool_call_parser", "trust_remote_code", "uvicorn_log_level",
    ), "",
) | {
    "api_key": "several keys too",
    "quantization": "a checkpoint's own format, or `unpack`; `int8`, and `int4` on a GPU",
    "config": "a YAML file with flags of any command that loads a model",
    "dtype": "`half` and `float` too",
    "enable_auto_tool_choice": "a model may always choose tools",
    "kv_cache_dtype": "also `int8` and `int4`; no fp8",
    "kv_cache_memory_bytes": "per R-worker, as `kv_cache_memory`",
    "load_format": "`auto` and `dummy`; formats that files tell by themselves are `auto`",
    "log_level": "in any case",
    "lora_modules": "one adapter, as NAME=FOLDER or vLLM's JSON",
    "mamba_ssm_cache_dtype": "`half` and `float` too",
    "max_model_len": "`4k`, `4K`, `auto` and `-1` too",
    "model_impl": "`auto` is transformers; `vllm` needs `fastdecode[vllm]`",
    "max_num_batched_tokens": "`8k` and `8K` too",
    "served_model_name": "several names",
    "spec_method": "as speculative_config.method",
    "spec_model": "as speculative_config.model",
    "spec_tokens": "as speculative_config.num_speculative_tokens",
    "speculative_config": "methods ngram, draft_model, early_exit",
}  # fmt: skip
"""vLLM's settings by name, each with a note about the accepted values; "" if nothing is special."""
