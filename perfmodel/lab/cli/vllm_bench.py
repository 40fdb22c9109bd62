"""The flags of ``vllm bench`` that FastDecode ignores or refuses, each with the reason."""

from __future__ import annotations

import argparse

from fastdecode.api.from_vllm import check_foreign
from fastdecode.api.vllm.foreign import refused, without_effect
from fastdecode.cli.vllm_flags import add_foreign_flags

OF_BENCHES = without_effect(
    {
        "a tokenizer.json says all": "tokenizer_mode trust_remote_code?",
        "requests come in the order of the file, each once, and as it has them": """
        no_oversample? disable_shuffle? skip_chat_template? custom_ensure_client_side_data?""",
        "the engine runs in this process, and all requests are there when it starts": """
        async_engine? prequeue_requests?""",
        "batches of transformers are as large as --max-num-seqs": "hf_max_batch_size hf_enable_torch_compile?",
        "the server names requests": "request_id_prefix",
    }
) | refused(
    [
        ("use_beam_search?", "there is no beam search"),
        ("profile?", "give --trace FILE to the command that has the engine"),
        ("append_result?", "give another --result-filename"),
        ("plot_dataset_stats? timeline_itl_thresholds", "--save-result --save-detailed writes what each request got"),
        ("self_timed?", "give --request-rate"),
        ("probe_request_rate", "start a second bench serve beside this one", 0),
        ("lora_modules*", "all requests ask for one model: give --served-model-name"),
        ("skip_tokenizer_init?", "prompts are made of tokens: give --tokenizer"),
        ("plot_timeline?", "--save-result --save-detailed writes what each request got"),
        ("lora_path", "give --lora-modules NAME=FOLDER"),
        ("lora_assignment", "all requests ask for one model", "random"),
        ("insecure?", "set the environment variable SSL_CERT_FILE to the server's certificate"),
        ("no_stream?", "answers are streamed, or nothing could be said of their tokens"),
        ("n", "give more --num-prompts", 1),
        ("prefix_len", "give --random-prefix-len", 0),
        ("random_batch_size", "a request has one prompt", 1),
        ("custom_output_len", "give --output-len, or output_tokens in the file"),
        ("sharegpt_output_len", "outputs are as long as the file's: give --dataset-name custom"),
        (
            "enable_multimodal_chat? random_mm_base_items_per_request random_mm_num_mm_items_range_ratio "
            "random_mm_limit_mm_per_prompt random_mm_bucket_config asr_min_audio_len_sec asr_max_audio_len_sec "
            "no_reranker?",
            "only text is run",
        ),
        (
            "hf_subset hf_split hf_name hf_output_len spec_bench_output_len spec_bench_category bfcl_categories "
            "prefix_repetition_prefix_len prefix_repetition_suffix_len prefix_repetition_num_prefixes "
            "prefix_repetition_output_len speed_bench_dataset_subset speed_bench_output_len speed_bench_category "
            "blazedit_min_distance blazedit_max_distance timed_trace_chunk_hash_size timed_trace_sec_multiplier "
            "timed_trace_label_timestamp timed_trace_label_input_length timed_trace_label_output_length "
            "timed_trace_label_hash_ids",
            "give --dataset-name random, sharegpt or custom: a custom one is JSONL with prompt and output_tokens",
        ),
    ]
)


def add_bench_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``vllm bench`` that FastDecode ignores or refuses, after the command's own flags."""
    parser.set_defaults(foreign_flags=add_foreign_flags(parser, OF_BENCHES))


def check_bench_flags(args: argparse.Namespace) -> None:
    """Log the vLLM flags that have no effect. Raise ConfigError for one that would measure something else."""
    check_foreign(vars(args), foreign={name: OF_BENCHES[name] for name in args.foreign_flags})
