"""vLLM's engine settings (``EngineArgs``, ``LLM``, and flags of ``vllm serve``) for which FastDecode has no field."""

from __future__ import annotations

from fastdecode.api.vllm.foreign import refused, without_effect

ADAPTERS = 'one adapter is merged into the weights of an engine: give lora_modules=["NAME=FOLDER"] when it is made'
TEXTS_ONLY = "models that embed, classify or score are not run here"
NO_SLEEP = "the model stays loaded: close, and load it again"
ELSEWHERE = "other hosts run R-workers: start them with `fastdecode launch`, and give r_workers=HOST:PORT,…"
REPLICAS = "start one engine each, or one with more R-workers"
NO_CODE = "no code is loaded by name"

WITHOUT_EFFECT = without_effect({
    "KV caches are not on the GPU here: --kv-cache-memory sizes them on each R-worker, and --prefill-scratch what "
    "prompts in progress take on the S-worker": "gpu_memory_utilization --device-memory-utilization",
    "kernels and CUDA graphs are chosen by the machine": """
        attention_backend attention_config -ac compilation_config -cc cudagraph_capture_sizes*
        max_cudagraph_capture_size optimization_level performance_mode kernel_config ir_op_priority
        enable_flashinfer_autotune?+ monokernel? moe_backend linear_backend sparse_indexer_topk_backend
        gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_backend mamba_ssu_algorithm use_replayssm?
        replayssm_buffer_len disable_cascade_attn? disable_custom_all_reduce? enable_shm_tensor_arena?
        max_seq_len_to_capture max_context_len_to_capture cuda_graph_sizes* use_v2_block_manager? use_fp64_gumbel?
        jit_monitor_mode jit_monitor_verbose? enable_dbo? ubatch_size dbo_decode_token_threshold
        dbo_prefill_token_threshold kv_sharing_fast_prefill? swa_bounded_replay?+ all2all_backend
        enable_sequence_parallel? override_attention_dtype""",
    "--schedule says how steps are put together, and prompts always come in chunks": """
        async_scheduling?+ enable_chunked_prefill?+ long_prefill_token_threshold
        long_prefill_token_threshold_adaptive? max_num_partial_prefills max_long_partial_prefills num_lookahead_slots
        num_scheduler_steps multi_step_stream_outputs?+ preemption_mode scheduler_delay_factor
        scheduler_reserve_full_isl?+ prefill_schedule_interval disable_hybrid_kv_cache_manager? watermark
        disable_async_output_proc? swap_space stream_interval disable_chunked_mm_input?""",
    "R-workers share the cache, and all experts are on the S-worker": """
        enable_expert_parallel? -ep enable_ep_weight_filter? enable_batch_sharded_sampling? enable_eplb? eplb_config
        expert_placement_strategy enable_elastic_ep? elastic_ep_max_dp_size enable_hc_sp? num_redundant_experts
        eplb_window_size eplb_step_interval eplb_log_balancedness? disable_nccl_for_dp_synchronization?
        distributed_executor_backend distributed_timeout_seconds cpu_distributed_timeout_seconds
        ray_workers_use_nsight? worker_use_ray? engine_use_ray? max_parallel_loading_workers dcp_comm_backend
        dcp_q_replicate? dcp_kv_cache_interleave_size cp_kv_cache_interleave_size data_parallel_backend -dpb
        data_parallel_rpc_port -dpp dp_sync_interval enable_nccl_comm_suspend? master_addr master_port""",
    "a lost R-worker is recovered from without a setting": """
        enable_fault_tolerance? fault_tolerance_config watchdog_config""",
    "--s-cores and --r-cores say which cores work": "numa_bind? numa_bind_nodes* numa_bind_cpus*",
    "weights are read from safetensors or GGUF, and KV caches leave them the device": """
        safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size
        model_loader_extra_config ignore_patterns* use_tqdm_on_load?+ pt_load_map_location cpu_offload_gb
        cpu_offload_params* offload_backend offload_group_size offload_num_in_group offload_prefetch_step
        offload_params* enable_cumem_allocator? allow_deprecated_quantization? sleep_mode_backend
        sleep_mode_offload_cudagraph? sleep_preserve_parameter_names*""",
    "only text is run": """
        allowed_local_media_path allowed_media_domains* limit_mm_per_prompt mm_processor_kwargs media_io_kwargs
        mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings? skip_mm_profiling?
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize?+ language_model_only? disable_mm_preprocessor_cache? default_mm_loras
        ec_manager_config enable_tower_connector_lora? enable_multimodal_encoder_data_parallel?
        enable_mm_processor_stats?""",
    "one adapter is merged into the weights: --lora-modules": """
        enable_lora? max_loras max_lora_rank max_cpu_loras fully_sharded_loras? specialize_active_lora?
        enable_mixed_moe_lora_format? enable_moe_shared_loras? max_lora_cls_labels enable_lora_bias?
        lora_extra_vocab_size long_lora_scaling_factors""",
    "--log-level says what is logged, and /metrics has all figures": """
        disable_log_stats? aggregate_engine_logging? disable_log_requests? enable_log_requests? log_config_file
        logging_config collect_detailed_traces* show_hidden_metrics_for_version per_request_spec_decode_metrics
        kv_cache_metrics? kv_cache_metrics_sample custom_histogram_buckets cudagraph_metrics?
        enable_layerwise_nvtx_tracing? enable_mfu_metrics? enable_logging_iteration_details?
        fail_on_environ_validation?""",
    "prefixes and states are kept in blocks of --block-size": """
        prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit mamba_block_size mamba_cache_mode
        enable_mamba_shared_prefix_checkpoint?""",
    "the grammars' library is chosen here": """
        structured_outputs_config guided_decoding_backend guided_decoding_disable_fallback?
        guided_decoding_disable_any_whitespace? guided_decoding_disable_additional_properties?""",
    "requests may ask for as many as there are": "max_logprobs",
    "one process reads all requests": "renderer_num_workers",
})  # fmt: skip
"""Ignored settings, of vLLM's internals or of media. Ignoring them changes no text."""

REFUSED = refused([
    ("additional_config aux_output_config", "nothing here takes any"),
    ("calculate_kv_scales?", "kv_cache_dtype int8 and int4 have scales of their own"),
    ("code_revision", "give revision"),
    ("hf_config_path", "give hf_overrides, or a model folder with that config.json"),
    ("config_format", "configurations come from transformers", "auto", "hf"),
    ("convert", TEXTS_ONLY, "auto", "none"),
    ("runner task", TEXTS_ONLY, "auto", "generate"),
    ("pooler_config override_pooler_config", TEXTS_ONLY),
    ("data_parallel_size -dp", REPLICAS, 1),
    ("data_parallel_rank -dpn data_parallel_start_rank -dpr data_parallel_size_local -dpl "
     "data_parallel_address -dpa data_parallel_hybrid_lb? -dph data_parallel_external_lb? -dpe "
     "data_parallel_multi_port_external_lb? -dpm", REPLICAS),
    ("pipeline_parallel_size -pp", "the layers run on one S-worker, or on ranks of tensor_parallel_size", 1),
    ("decode_context_parallel_size -dcp", "R-workers share the cache: give more of them, or kv_shard_tokens", 1),
    ("prefill_context_parallel_size -pcp", "give prefill_workers", 1),
    ("nnodes -n", ELSEWHERE, 1),
    ("node_rank -r", ELSEWHERE, 0),
    ("device_ids", "set the environment variable CUDA_VISIBLE_DEVICES"),
    ("disable_sliding_window? rope_scaling rope_theta", "give hf_overrides"),
    ("download_dir", "set the environment variable HF_HUB_CACHE"),
    ("enable_prompt_embeds?", "give text or token ids"),
    ("enable_return_routed_experts? return_sampling_mask? enable_trace_replay?",
     "outputs have tokens and log-probabilities alone"),
    ("enable_sleep_mode?", NO_SLEEP),
    ("hf_token~", "set the environment variable HF_TOKEN", True),
    ("kv_transfer_config", "give prefill_workers"),
    ("kv_events_config", "nothing publishes them: /metrics counts caches and hits"),
    ("ec_transfer_config enable_mm_embeds? mm_encoder_only?", "only text is run"),
    ("weight_transfer_config", "weights stay as they are while an engine runs"),
    ("kv_cache_dtype_skip_layers*", "all layers have one kv_cache_dtype"),
    ("kv_offloading_size", "caches are in CPU memory already: give kv_cache_memory"),
    ("kv_offloading_backend", "caches are in CPU memory already: give kv_cache_memory", "native"),
    ("lora_dtype", "an adapter is merged in the dtype of the weights", "auto"),
    ("lora_target_modules*", "an adapter names its own modules"),
    ("qlora_adapter_name_or_path", "give lora_modules"),
    ("logits_processors*", "no code comes with requests; logit_bias, allowed_token_ids and bad_words do much of it"),
    ("logprobs_mode", "log-probabilities come from the raw logits", "raw_logprobs"),
    ("mamba_cache_dtype", "give mamba_ssm_cache_dtype: windows of convolutions have the model's dtype", "auto"),
    ("enable_mamba_cache_stochastic_rounding?", "states are rounded to the nearest value"),
    ("mamba_cache_philox_rounds", "states are rounded to the nearest value", 0),
    ("max_num_scheduled_tokens", "give max_num_batched_tokens"),
    ("max_num_active_seqs", "give max_num_seqs"),
    ("max_num_queued_tokens", "give max_num_queued_reqs"),
    ("model_class_overrides model_weights", "models come from transformers"),
    ("io_processor_plugin reasoning_parser_plugin", f"{NO_CODE}: a tokenizer's response_template says what it writes"),
    ("scheduler_cls", f"{NO_CODE}: give schedule"),
    ("worker_cls", "workers are this program's own", "auto"),
    ("worker_extension_cls", "workers are this program's own"),
    ("num_gpu_blocks_override", "give kv_cache_memory"),
    ("quantization_config", "packed checkpoints say themselves how they are packed"),
    ("reasoning_config", "thoughts have no budget of their own: give max_tokens"),
    ("scheduling_policy", "requests come first in, first out", "fcfs"),
    ("tokenizer_mode", "tokenizers are those of the tokenizers library", "auto", "hf"),
    ("tokenizer_revision", "a tokenizer has the model's revision: give another as a folder"),
    ("watermark_config", "texts are not watermarked"),
    ("diffusion_config -dc engram_config", "such models are not run here"),
    ("profiler_config", "give trace=FILE, which writes Chrome trace events"),
    ("speculative_model num_speculative_tokens ngram_prompt_lookup_max ngram_prompt_lookup_min "
     "speculative_draft_tensor_parallel_size spec_decoding_acceptance_method speculative_max_model_len "
     "speculative_disable_by_batch_size",
     'give speculative_config, such as {"method": "ngram", "num_speculative_tokens": 4}'),
    ("enable_prompt_adapter? max_prompt_adapters max_prompt_adapter_token prompt_adapters*",
     "there are no prompt adapters: give lora_modules"),
])  # fmt: skip
"""Settings that the engine cannot follow, each with what to do instead."""
