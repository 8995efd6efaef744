"""Argument names of vLLM, SGLang, transformers and mlx-lm that jspec lacks, each with its replacement."""

_PARALLEL = "an engine runs on the GPUs of tensor_parallel; run one engine for each replica (docs/guides/ray.md)"
_BEAMS = "jspec samples and has no beam search; leave it out"
_N = "it is n, the number of completions; jspec ranks none of them"
_DRAFT = "it is draft of jspec.load(): a checkpoint folder, 'ngram' or 'mtp'"
_MAX_LEN = "it is max_len of jspec.load(), the longest prompt plus completion"

# Name -> end of the sentence "jspec.generate() has no argument ...: ..." that names the replacement.
FOREIGN_NAMES = {
    # How a request is sampled and when it ends.
    "stop_strings": "it is stop",
    "stop_sequences": "it is stop",
    "stopping_criteria": "use stop, stop_token_ids or max_tokens",
    "eos_token_id": "use stop_token_ids; the checkpoint's own end-of-sequence ids count unless ignore_eos=True",
    "max_length": "in transformers it counts the prompt too; max_tokens counts new tokens only, and max_len of "
    "jspec.load() is the longest prompt plus completion",
    "min_length": "in transformers it counts the prompt too; min_tokens counts new tokens only",
    "min_new_tokens": "it is min_tokens",
    "do_sample": "temperature says it: 0 is greedy, anything above samples",
    "num_beams": _BEAMS,
    "use_beam_search": _BEAMS,
    "beam_width": _BEAMS,
    "length_penalty": _BEAMS,
    "no_repeat_ngram_size": "jspec has repetition_penalty, frequency_penalty and presence_penalty",
    "best_of": _N,
    "num_return_sequences": "it is n",
    "output_scores": "it is logprobs, the number of likeliest tokens beside the chosen one",
    "stream": "use jspec.stream(), which yields text as it comes",
    "streamer": "use jspec.stream(), which yields text as it comes",
    "rng": "it is key, a JAX key, or seed, a number",
    "prompt": "it is prompts, the second argument of jspec.generate()",
    "prompt_token_ids": "give token ids as prompts, the second argument of jspec.generate()",
    "input_ids": "give token ids as prompts, the second argument of jspec.generate()",
    "messages": "call llm.chat(messages), or give llm.chat_prompt(messages) as a prompt",
    "attention_mask": "prompts of different lengths go into one list as they are, without padding",
    "pad_token_id": "prompts of different lengths go into one list as they are, without padding",
    # What is loaded, and how it drafts.
    "model": "it is target, the first argument",
    "max_model_len": _MAX_LEN,
    "max_seq_len": _MAX_LEN,
    "context_length": _MAX_LEN,
    "max_num_seqs": "it is max_batch of jspec.load()",
    "batch_size": "it is max_batch of jspec.load()",
    "block_size": "it is page_size of jspec.load()",
    "torch_dtype": "it is dtype of jspec.load(): 'float32' or 'bfloat16'",
    "device": "JAX chooses the device; the variable JAX_PLATFORMS says otherwise",
    "device_map": "JAX chooses the device; the variable JAX_PLATFORMS says otherwise",
    "enable_expert_parallel": "it is expert_parallel of jspec.load()",
    "pipeline_parallel_size": _PARALLEL,
    "data_parallel_size": _PARALLEL,
    "enable_prefix_caching": "it is prefix_cache of jspec.load(), True unless you say otherwise",
    "max_num_batched_tokens": "it is prefill_tokens of jspec.load(), the most tokens of a prefill pass",
    "num_gpu_blocks_override": "it is num_pages of jspec.load()",
    "sampling_params": "it is params, or its fields by name",
    "cache_salt": "it is salt, of jspec.stream(), llm.engine.add() and AsyncEngine.generate()",
    "quantization": "quantise with jspec-convert --quantize, and load the folder that it writes; FP8 ones load as they are",
    "load_in_8bit": "quantise with jspec-convert --quantize int8, and load the folder that it writes",
    "trust_remote_code": "jspec never runs code from a checkpoint",
    "enforce_eager": "jspec always compiles; leave it out",
    "revision": "it stands behind the name of a model: org/name@revision",
    "download_dir": "downloads go into the hub's local cache, whose folder the variable HF_HOME names",
    "tokenizer": "the tokenizer is read from the target's folder",
    "speculative_model": _DRAFT,
    "assistant_model": _DRAFT,
    "draft_model": _DRAFT,
    "speculative_draft_model_path": _DRAFT,
    "speculative_config": "its model is draft of jspec.load(), its num_speculative_tokens is num_draft_tokens",
    "num_assistant_tokens": "it is num_draft_tokens",
    "speculative_num_draft_tokens": "it is num_draft_tokens",
    "prompt_lookup_num_tokens": "it is num_draft_tokens, with draft='ngram'",
    "prompt_lookup_max": "it is ngram_max, with draft='ngram'",
    "prompt_lookup_min": "it is ngram_min, with draft='ngram'",
}
