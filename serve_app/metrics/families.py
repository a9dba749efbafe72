"""The help texts of all metric families, by name; a counter's name is without its `_total`.

The names of an engine's metrics are vLLM's, so that its dashboards work.
"""

HELP = {
    # An engine.
    "vllm:num_requests_running": "Sequences in the batch",
    "vllm:num_requests_waiting": "Sequences not begun",
    "vllm:num_requests_waiting_by_reason": (
        "Sequences not begun; deferred: their adapter has no room"
    ),
    "vllm:kv_cache_usage_perc": "Used KV blocks, 1 = all",
    "vllm:gpu_cache_usage_perc": "Old name of kv_cache_usage_perc",
    "vllm:cache_config_info": "KV cache",
    "vllm:lora_requests_info": "Adapters in use",
    "vllm:engine_sleep_state": "1 for the state; an engine that sleeps has ended: discard_all",
    "vllm:num_gpu_loaded_lora_adapters": "Adapters on the device",
    "vllm:max_gpu_lora_adapters": (
        "Adapters that the device's pool holds if they are as large as those there now"
    ),
    "vllm:lora_adapter_loaded": "1 for each adapter in memory; level: gpu or cpu",
    "vllm:lora_adapter_load_seconds": "By transition; load: from the files into host memory",
    "vllm:prompt_tokens": "Prompt tokens of begun requests",
    "vllm:prompt_tokens_by_source": "Prompt tokens computed, or found in the prefix cache",
    "vllm:generation_tokens": "Generated tokens",
    "vllm:prompt_tokens_cached": "Prompt tokens from cache",
    "vllm:prefix_cache_queries": "Tokens looked up",
    "vllm:prefix_cache_hits": "Tokens found on the device",
    "vllm:external_prefix_cache_queries": "Tokens looked up in the host tier of KV",
    "vllm:external_prefix_cache_hits": "Tokens whose KV came from the host tier",
    "vllm:num_preemptions": "Sequences put back to recompute, or to load from the host tier",
    "vllm:spec_decode_num_drafts": "Drafts that steps verified",
    "vllm:spec_decode_num_draft_tokens": "Tokens of these drafts",
    "vllm:spec_decode_num_accepted_tokens": "Tokens of these drafts that were drawn",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "The same, by their place in the draft",
    "vllm:request_success": "Choices that ended, by reason",
    "vllm:corrupted_requests": "Choices that ended because the logits were not finite",
    "vllm:time_to_first_token_seconds": "Arrival to first token",
    "loraplex_inter_token_latency_seconds": (
        "Between two outputs of one choice, in finer buckets than vLLM's"
    ),
    "vllm:inter_token_latency_seconds": "Between two outputs of one choice",
    "vllm:time_per_output_token_seconds": "Old name of inter_token_latency_seconds",
    "vllm:request_time_per_output_token_seconds": (
        "Mean time between the output tokens of a request's longest choice"
    ),
    "vllm:e2e_request_latency_seconds": "Arrival to last token",
    "vllm:request_queue_time_seconds": "Arrival at the front to the engine",
    "vllm:request_prefill_time_seconds": "Engine admission to first token",
    "vllm:request_decode_time_seconds": "First token to last",
    "vllm:request_inference_time_seconds": "Engine admission to last token",
    "vllm:request_prompt_tokens": "Prompt length",
    "vllm:request_generation_tokens": "Generated, all choices",
    "vllm:request_max_num_generation_tokens": "Generated, longest choice",
    "vllm:request_prefill_kv_computed_tokens": "Tokens computed before the first, without cached",
    "vllm:request_num_preemptions": "Preemptions of a request's sequences",
    "vllm:request_params_n": "Choices asked for",
    "vllm:request_params_max_tokens": "max_tokens asked for",
    "vllm:iteration_tokens_total": "Tokens a step gave",
    "loraplex_adapter_tier_hits": "Requests by the tier that held their adapter when they came",
    "loraplex_adapters_in_memory": "Adapters; those on the device lie on the host, too",
    "loraplex_adapter_memory_bytes": "Taken by adapters",
    "loraplex_engine_resident_bytes": "The process's memory",
    "loraplex_adapters_pinned": "In memory",
    "loraplex_adapter_device_copies": "Host to device",
    "loraplex_kv_host_blocks": "KV blocks in host memory",
    "loraplex_kv_host_copied_bytes": "KV; store: to the host, load: to the device",
    "loraplex_kv_host_copy_seconds": "Of these copies, as the device measures them",
    "loraplex_kv_host_swapped_blocks": "Stored for preempted sequences",
    "loraplex_kv_host_dropped_blocks": "Evicted from the device before a copy had begun",
    "loraplex_engine_late_compilations": (
        "Kernels compiled or read from disk after the engine was ready: always a fault"
    ),
    "loraplex_engine_missed_wakeups": (
        "Times that the engine slept beside requests that it could run: always a fault"
    ),
    # An engine replica.
    "loraplex_adapter_load_seconds": (
        "From the files' tier into host memory, fetching and checks included"
    ),
    "loraplex_cache_bytes": "Of local copies, as the limit counts",
    "loraplex_cache_limit_bytes": "registry.cache_bytes",
    "loraplex_cache_downloads_in_flight": "Now",
    "loraplex_cache_hits": "Folders found in the cache",
    "loraplex_cache_misses": "Folders that had to be fetched",
    "loraplex_cache_evictions": "Folders that made room",
    "loraplex_quarantined_versions": "Bad files, not tried again for a while; by what failed",
    # An ingress.
    "http_requests": "HTTP answers by route, method and class of status, as vLLM counts them",
    "loraplex_http_answers": "HTTP answers",
    "loraplex_authentication_failures": (
        "Requests without a valid key, or whose key lacks the scope, by reason"
    ),
    "loraplex_limit_refusals": "Requests refused because their key reached a limit, by limit",
    "loraplex_active_limited_keys": "Keys with limits that were recently in use",
    "loraplex_client_disconnects": "Clients gone before the end",
    "loraplex_open_engine_requests": "Engine requests being read",
    "loraplex_router_decisions": "Requests sent to an engine replica, by what decided which",
    "loraplex_router_affinity_hits": "Of them, those sent to where their adapter was in memory",
    "loraplex_router_expected_ttft_ratio": (
        "Expected over measured time from the choice of the replica to the first token"
    ),
    "loraplex_requests_migrated": "Requests that left their engine for another one",
    "loraplex_requests_lost": "Requests that failed because their engine went",
    "loraplex_requests_quarantined": "Requests that killed their engines",
    "loraplex_migration_gap_seconds": "Last token on one engine to the first on the next",
    "loraplex_queue_waiting": "Requests that wait in front of the engines",
    "loraplex_queue_wait_seconds": "What they waited until they went",
    "loraplex_shed": "Refused with Retry-After",
    "loraplex_tenant_tokens": "Prompt and output tokens of the tenants that have weights",
    "loraplex_adapter_requests": "Finished requests by adapter, by how they ended",
    "loraplex_adapter_prompt_tokens": "Prompt tokens of finished requests, by adapter",
    "loraplex_adapter_output_tokens": "Output tokens of finished requests, by adapter",
    "loraplex_adapter_time_to_first_token_seconds": "Arrival to first token, by adapter",
    "loraplex_adapter_request_latency_seconds": (
        "Arrival to the end of requests that ended well, by adapter"
    ),
    "loraplex_tenant_requests": "Finished requests by tenant, by how they ended",
    "loraplex_tenant_prompt_tokens": "Prompt tokens of finished requests, by tenant",
    "loraplex_tenant_output_tokens": "Output tokens of finished requests, by tenant",
    "loraplex_tenant_time_to_first_token_seconds": "Arrival to first token, by tenant",
    "loraplex_tenant_request_latency_seconds": (
        "Arrival to the end of requests that ended well, by tenant"
    ),
    "loraplex_request_log_dropped": "Lines lost: the disk was too slow or full",
    "loraplex_arm_requests": "Requests of split adapters, by how they ended",
    "loraplex_arm_output_tokens": "Of split adapters",
    "loraplex_arm_time_to_first_token_seconds": "Of split adapters, arrival to first token",
    "loraplex_arm_request_latency_seconds": (
        "Of split adapters, arrival to last token, of those that ended well"
    ),
    "loraplex_shadows": "Copies under way",
    "loraplex_shadows_dropped": "Copies not made: others would wait",
    # The manager.
    "loraplex_canary_rollbacks": "Canaries rolled back by the rule",
    "loraplex_base_state": "1 for the state that it is in",
    "loraplex_replicas": "Engine replicas",
    "loraplex_base_cold_starts": "Starts out of sleep",
    "loraplex_base_start_seconds": "From the order to the first answer",
    "loraplex_key_budget_used_ratio": (
        "Recorded tokens of this day or month to the budget of a key; the 100 closest to theirs"
    ),
    "loraplex_registry_up": "1: the last read of the registry succeeded",
    "loraplex_registry_last_success_timestamp_seconds": (
        "When a read last succeeded, Unix time; 0: never"
    ),
    "loraplex_registry_snapshot_seconds": (
        "Duration of the last good read; near 0 where SQLite reports no change"
    ),
    "loraplex_registry_changes": "Changes seen in the registry",
    "loraplex_reconcile_age_seconds": (
        "Since the manager last compared the served bases with the wanted ones"
    ),
    # Every process.
    "loraplex_task_failures": (
        "Background tasks that failed, by name; the ingress and the manager have no engine"
    ),
}
