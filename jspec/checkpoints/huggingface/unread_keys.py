"""Warns of keys of config.json that no reader looked up and that are not known to leave the mathematics alone.

A key that jspec does not know may change what a model computes: a scale, a softcap, another attention. Weights would load
all the same, and only the texts would be worse. So such keys are named. ``HARMLESS`` lists those that are known to change
nothing. ``Fields.asked`` says which keys were looked up, so a key that a reader gains is known at once.
"""

import warnings
from collections.abc import Container, Iterator, Mapping
from typing import Any

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.huggingface.rope import KEYS

_TRAINING = """
    attention_dropout attn_pdrop aux_loss_alpha aux_loss_coef classifier_dropout dropout embd_dropout embd_pdrop
    embed_requires_grad ep_size gradient_checkpointing hidden_dropout hidden_dropout_prob init_std initializer_factor
    initializer_range layerdrop num_anchors output_router_logits pretraining_tp resid_pdrop residual_dropout
    router_aux_loss_coef router_jitter_noise seq_aux step_loss_decay ttt_length z_loss_coef
"""
_ABOUT_THE_FILE = """
    _attn_implementation _attn_implementation_autoset _attn_implementation_internal _commit_hash _experts_implementation
    _name_or_path architectures attn_implementation auto_map base_model_name_or_path bos_token dtype eos_token
    finetuning_task has_no_defaults_at_init id2label label2id license model_type name_or_path problem_type speculators_config
    speculators_version target_model_name_or_path target_model_type task_specific_params tokenizer_class torch_dtype
    transformers_version unsloth_fixed unsloth_version version
"""
_OTHER_USES = """
    add_cross_attention add_pooling_layer chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id
    image_token_id image_token_index is_decoder is_encoder_decoder mask_token_id modal_type num_labels output_attentions
    output_hidden_states pad_token_id pooling_type prefix pruned_heads return_dict sep_token_id tf_legacy_loss
    tie_encoder_decoder torchscript use_bfloat16 use_cache use_return_dict video_token_id vision_end_token_id
    vision_start_token_id
"""
# Of MiniMax-M2 and Hunyuan: parts that their published files do not have, and tokens that only other uses mark.
_WITHOUT_MEANING = """
    add_classification_head cla_share_factor class_num dense_list eod_token_id im_end_id im_newline_id im_start_id
    mask_init_id mlp_intermediate_size mtp_transformer_layers num_mtp_modules org_vocab_size pad_id pool_type shared_moe_mode
    text_end_id text_start_id use_mtp
"""
_GENERATION = """
    bad_words_ids begin_suppress_tokens diversity_penalty do_sample early_stopping encoder_no_repeat_ngram_size
    exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id length_penalty max_length max_new_tokens
    min_length no_repeat_ngram_size num_beam_groups num_beams num_return_sequences output_scores remove_invalid_values
    repetition_penalty return_dict_in_generate suppress_tokens temperature top_k top_p typical_p
"""
# Of draft heads: candidates of trees, where jspec drafts a chain, and what the tensors or another key decide.
_DRAFTING = """
    confidence_head_with_markov dspark_noise_token_id enable_confidence_head markov_head_type n_candidates pard_token
    parallel_draft_heads_num_layers parallel_drafting ptd_token_id reuse_target_lm_head top_k_tokens_per_head
    use_confidence_head
"""
_LENGTHS = "initial_context_length max_sequence_length model_max_length num_lookahead_tokens seq_length"
# Keys that another key or the size of a tensor decides, and keys that count under certain values of others alone:
# what a rotary embedding of one kind reads, for example, or the window of layers of which none slides.
_DECIDED_BY_OTHERS = """
    _remove_final_layer_norm _sliding_window_pattern activation_function attention_bias bos_token_id eos_token_id
    experts_per_token first_k_dense_replace head_dim hidden_act hidden_activation hidden_size intermediate_size layer_types
    max_window_layers mlp_bias mlp_layer_types mlp_only_layers mtp_mlp_layer_types no_rope_layer_interval norm_topk_prob
    num_attention_heads num_experts num_key_value_heads num_local_experts num_mtp_layers num_nextn_predict_layers
    original_max_position_embeddings qk_head_dim qkv_bias quantization_config rope_local_base_freq rope_parameters
    rope_scaling rope_theta sliding_window sliding_window_pattern tie_word_embeddings use_sliding_window vocab_size
"""
_ROPE = """
    attention_factor beta_fast beta_slow factor finetuned high_freq_factor long_factor low_freq_factor mscale mscale_all_dim
    original_max_position_embeddings partial_rotary_factor rope_theta rope_type short_factor truncate type
"""
HARMLESS = frozenset(
    " ".join(
        (
            _TRAINING,
            _ABOUT_THE_FILE,
            _OTHER_USES,
            _WITHOUT_MEANING,
            _GENERATION,
            _DRAFTING,
            _LENGTHS,
            _DECIDED_BY_OTHERS,
        )
    ).split()
)
HARMLESS_IN_ROPES = frozenset(_ROPE.split())
# Objects whose readers check them, or that describe what is not computed.
_UNCHECKED = ("quantization_config", "compression_config", "speculators_config", "task_specific_params", "auto_map")
_UNCHECKED += ("vision_config",)


def warn_of_unread_keys(fields: Fields, multimodal: bool = False):
    """Warn of the ``unread_keys`` in one sentence; nothing is said if there are none."""
    unread = unread_keys(fields, multimodal)
    if unread:
        warnings.warn(
            f"{fields.where}: jspec does not know {', '.join(unread)}; if what the model computes depends on it, this is "
            "not the model that its authors trained",
            stacklevel=2,
        )


def unread_keys(fields: Fields, multimodal: bool = False) -> list[str]:
    """The paths of the keys that nothing looked up, without those that change nothing.

    Args:
      fields: config.json, after everything that reads it.
      multimodal: whether only the object ``text_config`` counts, because the other keys describe other parts.
    """
    raw = fields.raw["text_config"] if multimodal else fields.raw
    return sorted(_unread(raw, "text_config." if multimodal else "", fields.asked, HARMLESS))


def _unread(raw: Mapping[str, Any], path: str, asked: set[str], harmless: Container[str]) -> Iterator[str]:
    """The paths of keys that are neither in ``asked`` nor harmless, those of nested objects too; null is no value.

    Args:
      raw: config.json, or an object in it.
      path: the path of that object, with a point at its end; empty for config.json.
      asked: the paths that were looked up.
      harmless: keys that change nothing in this object.
    """
    for key, value in raw.items():
        if value is None or key in _UNCHECKED:
            continue
        if path + key not in asked:
            if key not in harmless:
                yield path + key
        elif isinstance(value, dict):
            inside = HARMLESS_IN_ROPES if key in KEYS else harmless
            yield from _unread(value, f"{path}{key}.", asked, inside)
