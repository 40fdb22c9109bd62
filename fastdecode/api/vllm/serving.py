"""vLLM's server flags (``vllm serve``) that are no engine settings and for which FastDecode has no field."""

from __future__ import annotations

from fastdecode.api.vllm.engine import ELSEWHERE, NO_CODE, REPLICAS
from fastdecode.api.vllm.foreign import refused, without_effect

WITHOUT_EFFECT = without_effect({
    "requests are not logged, and --log-level says what is": """
        disable_uvicorn_access_log? disable_access_log_for_endpoints max_log_len enable_log_outputs?
        enable_log_deltas?+ log_error_stack?""",
    "headers are limited to 64 KiB": "h11_max_incomplete_event_size h11_max_header_count",
    "one process serves all requests": """
        api_server_count -asc disable_frontend_multiprocessing? data_parallel_supervisor_port
        dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold""",
    "the chat template says it": """
        cohere_is_reasoning_model?+ cohere_format anthropic_disabled_thinking_effort enable_reasoning?""",
    "no answer has more than its text for it": """
        enable_offline_docs? enable_flash_late_interaction?+ trust_request_mm_kwargs? fingerprint_mode
        fingerprint_value""",
    "a template never sees the tools of such a request": "exclude_tools_when_tool_choice_none?",
    "usage always counts cached tokens": "enable_prompt_tokens_details?",
})  # fmt: skip

REFUSED = refused([
    ("headless?", ELSEWHERE),
    ("grpc? grpc_port", "clients speak HTTP to it"),
    ("uds", "give host and port"),
    ("middleware*", f"{NO_CODE}: put a proxy before the server"),
    ("tool_server", "tools are the clients' own"),
    ("tool_parser_plugin", f"{NO_CODE}: a tokenizer's response_template says what it writes"),
    ("tool_strict_level", "a request's tools are strict where they say so, or with tool_choice required", "auto"),
    ("tokens_only? enable_scale_out?", REPLICAS),
    ("response_role", "answers have the role assistant", "assistant"),
    ("return_tokens_as_token_ids?", "requests may ask with return_token_ids, and token ids come beside the text"),
    ("enable_tokenizer_info_endpoint?", "/tokenize and /detokenize are there"),
    ("enable_server_load_tracking? enable_per_request_metrics?", "/metrics has such figures"),
    ("enable_force_include_usage?", 'streams have it where requests say stream_options {"include_usage": true}'),
    ("sse_keep_alive_interval", "raise the proxy's read timeout", 0),
    ("trust_request_chat_template?", "clients cannot bring their own; give chat_template"),
    ("reasoning_effort_map", "give default_chat_template_kwargs, or chat_template_kwargs with a request"),
    ("enable_ssl_refresh?", "start the server anew with the new certificate, or put a proxy before it"),
])  # fmt: skip

OF_BATCHES = without_effect({
    "answers are written as they come, into the file that is named": "output_tmp_dir",
    "a batch has no metrics: `fastdecode serve` has /metrics": "enable_metrics? host url port",
})  # fmt: skip
"""Flags that only ``vllm run-batch`` has; FastDecode ignores or refuses them."""
