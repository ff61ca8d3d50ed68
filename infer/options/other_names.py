"""Other servers' names of options: which of them are taken, and what a command line that sets another is told."""

from __future__ import annotations

from collections.abc import Collection, Iterable

# What other servers call it, vLLM's words mostly, fields of its speculative_config included, and what it is here.
ELSEWHERE = {
    **dict.fromkeys(
        (
            *("num_speculative_tokens", "speculative_num_draft_tokens", "num_draft_tokens", "n_predict"),
            *("num_spec_tokens", "spec_tokens", "speculative_tokens"),
        ),
        "proposer.max_draft_tokens, in a request speculative.max_draft_tokens",
    ),
    **dict.fromkeys(
        ("speculative_config", "speculative_algorithm", "spec_method", "method"), "proposer=<name> and head=<name>"
    ),
    **dict.fromkeys(
        ("speculative_model", "spec_model", "speculative_draft_model_path"), "head.path, or proposer.draft_model"
    ),
    **{f"ngram_prompt_lookup_{end}": f"proposer.prompt_lookup_{end}" for end in ("max", "min")},
    "suffix_decoding_corpus_tokens": "proposer.suffix_decoding_max_cached_requests",
    **dict.fromkeys(
        ("draft_tensor_parallel_size", "speculative_draft_tensor_parallel_size"),
        "engine.tensor_parallel, which is the target's; rank 0 drafts alone",
    ),
    **dict.fromkeys(
        (
            *("disable_by_batch_size", "speculative_disable_by_batch_size", "num_speculative_tokens_per_batch_size"),
            *("enable_adaptive_verification", "adaptive_verification", "enable_adaptive_k"),
        ),
        "proposer.adaptive=true, which drafts at each batch size as far as that pays",
    ),
    **dict.fromkeys(
        ("acceptance_method", "spec_decoding_acceptance_method", "rejection_sample_method"), "proposer.acceptance"
    ),
    "typical_acceptance_sampler_posterior_threshold": "proposer.posterior_threshold",
    "typical_acceptance_sampler_posterior_alpha": "proposer.posterior_alpha",
    **dict.fromkeys(
        ("synthetic_acceptance_rates", "synthetic_acceptance_rate", "synthetic_acceptance_length"),
        "proposer=synthetic proposer.acceptance=[...]",
    ),
    "use_heterogeneous_vocab": "nothing to set: proposer.draft_model compares the tokenizers",
    "draft_sample_method": "nothing to set: drafts are drawn with the target's noise",
    **dict.fromkeys(
        ("speculative_token_tree", "spec_token_tree", "speculative_num_steps", "speculative_eagle_topk"),
        "proposer.tree=beam:<width>x<depth>, or proposer.max_draft_tokens for a chain",
    ),
    "dspark_draft_topk": "proposer.candidates",
    **dict.fromkeys(
        (
            *("disable_padded_drafter_batch", "disable_eagle_block_drop", "use_local_argmax_reduction"),
            *("draft_load_config", "index_share_for_mtp_iteration", "code_revision", "speculative_max_model_len"),
            *("disable_logprobs", "disable_logprobs_during_spec_decoding", "speculative_disable_mqa_scorer"),
            *("use_v2_block_manager", "async_scheduling", "per_request_spec_decode_metrics"),
            *("disable_log_requests", "disable_log_stats", "enable_metrics"),
        ),
        "nothing to set",
    ),
    **dict.fromkeys(("attention_backend", "moe_backend"), "the environment variable HEADWAY_KERNELS"),
    **dict.fromkeys(("tensor_parallel_size", "tp"), "engine.tensor_parallel"),
    "pipeline_parallel_size": "engine.tensor_parallel; layers are not spread over ranks",
    "data_parallel_size": "server.replicas",
    **dict.fromkeys(("gpu_memory_utilization", "mem_fraction_static"), "engine.memory_share"),
    **dict.fromkeys(("max_num_seqs", "max_running_requests"), "engine.max_batch"),
    "max_num_batched_tokens": "engine.max_rows, and engine.prefill_chunk for one prompt",
    **dict.fromkeys(("enable_chunked_prefill", "chunked_prefill_size"), "engine.prefill_chunk"),
    **dict.fromkeys(("ctx_size", "n_ctx", "context_length", "max_seq_len"), "engine.max_model_len"),
    "num_gpu_blocks_override": "engine.max_tokens_in_cache",
    "kv_cache_dtype": "engine.kv_dtype",
    "block_size": "engine.page_size",
    "enable_prefix_caching": "engine.prefix_cache",
    "enforce_eager": "engine.graphs=off",
    "quantization": "engine.weights; a quantized checkpoint says itself how it is stored",
    **dict.fromkeys(("rope_scaling", "hf_overrides"), "rope_scaling in the model's config.json"),
    **{name: f"model.{name}" for name in ("dtype", "device", "revision")},
    **{name: f"server.{name}" for name in ("host", "port")},
    "draft_model": "proposer.draft_model",
    "served_model_name": "model.name",
    **dict.fromkeys(("api_key", "api_keys"), "HEADWAY_API_KEY or server.api_keys_file"),
    **dict.fromkeys(("tool_call_parser", "enable_auto_tool_choice"), "server.tool_parser"),
    "chat_template": "chat_template.jinja in the model's folder",
    "tokenizer": "the tokenizer in the model's folder",
    "trust_remote_code": "nothing: no code of a checkpoint is run",
}
# Keys that may be written without their group, where a command has no key of that name
SHORT = {
    **{name: f"engine.{name}" for name in ("max_model_len", "memory_share", "seed")},
    **{
        name: f"proposer.{name}"
        for name in (
            *("acceptance", "posterior_threshold", "posterior_alpha"),
            *("parallel_drafting", "prompt_lookup_max", "prompt_lookup_min"),
            *("suffix_decoding_max_tree_depth", "suffix_decoding_max_spec_factor"),
            *("suffix_decoding_min_token_prob", "suffix_decoding_max_cached_requests"),
        )
    },
}


def elsewhere(key: str) -> str | None:
    """Return what a key of other servers is called here, None for any other."""
    name = key.rpartition(".")[2].replace("-", "_")
    return SHORT.get(key.replace("-", "_")) or ELSEWHERE.get(name)


def full_keys(words: Iterable[str], fields: Collection[str]) -> list[str]:
    """Return the words of a command line with the groups of keys in SHORT that are not among the command's `fields`.

    Raises ValueError for an option written as other servers have it: --max-model-len 4096.
    """
    result = []
    for word in words:
        key, equals, value = word.partition("=")
        if word.startswith("--") and (here := elsewhere(key[2:])):
            name = key[2:].replace("-", "_")
            here = name if name in fields else here
            raise ValueError(f"{key}: options are written key=value, without dashes; here {here}")
        if equals and key in ELSEWHERE and key not in fields:  # before Hydra reads the value, which may be JSON
            raise ValueError(unknown(key))
        full = SHORT.get(key, "") if equals and key not in fields else ""
        result.append(f"{full}={value}" if full.partition(".")[0] in fields else word)
    return result


def unknown(key: str) -> str | None:
    """Return what an unknown key that other servers have is called here; None for any other."""
    here = elsewhere(key)
    return f"{key}: unknown key; here {here}" if here else None
