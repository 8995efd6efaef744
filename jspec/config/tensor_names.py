"""Tensor names of language models in checkpoints, by transformers class.

``NAMES`` has an entry for each architecture whose names differ from Llama's.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """Names of tensors in a checkpoint, without their last part, ``.weight`` or ``.bias``.

    The names of layers stand behind ``layers.{}.``, and all others but ``head`` behind ``prefix``.

    Attributes:
      prefix: the beginning of all names but that of the output head.
      embedding, positions, project_in, project_out, norm, head: names outside the layers.
      norms: name of a layer's norm in the params -> its name in the checkpoint, for each norm that any placement has.
      qkv, gate_up: the tensors that are stacked into one weight, in this order. A single name means that the checkpoint
        holds them stacked already.
      out, q_norm, k_norm, up, down: further names in a layer; ``up`` is that of an MLP without a gate.
      query_down, query_norm, query_up, query, latent_down, latent_norm, latent_up: of latent attention; ``query`` is the
        map of queries that have no rank.
      sinks: the sinks of the attention heads; the name is complete.
      scalar: the number by which a layer multiplies the residual stream; the name is complete.
      layer_inputs, layer_inputs_projection, layer_inputs_norm: of per-layer inputs, outside the layers: their table, the map
        from embeddings to them, and its norm.
      layer_gate, layer_out, layer_out_norm: of per-layer inputs, in a layer.
      router, experts: of a mixture of experts; behind ``experts`` stand the number of an expert and one of ``expert_maps``,
        which are gate, up and down. Behind ``shared_experts`` stand the same three maps of all shared experts.
      shared_gate: the map to the number that the outputs of shared experts are multiplied by.
      correction: the bias of the experts' probabilities when experts are chosen; the name is complete.
      beside_norms: of experts beside the MLP, name of a norm in the params -> its name in the checkpoint.
      router_scale, expert_scale: of experts beside the MLP: the factors of the router's inputs, and of the experts' weights;
        the names are complete.
      mtp: how all names of layers for multi-token prediction begin; None if these stand behind the last layer, with names of
        the same beginning (``jspec.checkpoints.layouts.mtp``).
      delta_inputs: None, or of a gated delta net the parts of tensors with the rows of queries, keys, values and gates; then
        those of betas and decays (``jspec.checkpoints.tensors.parts``).
      delta_convolution, delta_decay, delta_bias, delta_norm, delta_out: of a gated delta net: its convolution, the logarithm
        of its rate of decay, what is added to its decays, both complete; the norm of its outputs, and their linear map.
      transposed_experts: where a checkpoint may hold the maps of all experts of a layer in one tensor, whether it has input
        features before output features as published (``jspec.checkpoints.tensors.split_experts``).
      stacked_maps: None, or the two tensors in which a layer has the maps of all its experts: those of gate and up, row by
        row in turn, and those of down. They have no last part ``.weight``
        (``jspec.checkpoints.tensors.stacked_experts``).
    """

    prefix: str = "model."
    embedding: str = "embed_tokens"
    positions: str = "embed_positions"
    project_in: str = "project_in"
    project_out: str = "project_out"
    norm: str = "norm"
    head: str = "lm_head"
    norms: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
    )
    qkv: tuple[str, str, str] | str = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    query: str = "self_attn.q_proj"
    query_down: str = "self_attn.q_a_proj"
    query_norm: str = "self_attn.q_a_layernorm"
    query_up: str = "self_attn.q_b_proj"
    latent_down: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    latent_up: str = "self_attn.kv_b_proj"
    sinks: str = "self_attn.sinks"
    scalar: str = "layer_scalar"
    layer_inputs: str = "embed_tokens_per_layer"
    layer_inputs_projection: str = "per_layer_model_projection"
    layer_inputs_norm: str = "per_layer_projection_norm"
    layer_gate: str = "per_layer_input_gate"
    layer_out: str = "per_layer_projection"
    layer_out_norm: str = "post_per_layer_input_norm"
    gate_up: tuple[str, str] | str = ("mlp.gate_proj", "mlp.up_proj")
    up: str = "mlp.up_proj"
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    experts: str = "mlp.experts"
    shared_experts: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    correction: str = "mlp.gate.e_score_correction_bias"
    beside_norms: Mapping[str, str] = dataclasses.field(
        default_factory=lambda: {
            "mlp_norm": "post_feedforward_layernorm_1",
            "norm": "pre_feedforward_layernorm_2",
            "out_norm": "post_feedforward_layernorm_2",
        }
    )
    router_scale: str = "router.scale"
    expert_scale: str = "router.per_expert_scale"
    expert_maps: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    mtp: str | None = None
    delta_inputs: tuple[tuple[str, str, str, str], tuple[str, str]] | None = None
    delta_convolution: str = "linear_attn.conv1d"
    delta_decay: str = "linear_attn.A_log"
    delta_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm"
    delta_out: str = "linear_attn.out_proj"
    transposed_experts: bool = False
    stacked_maps: tuple[str, str] | None = None


LLAMA = TensorNames()
_QKVZ, _BA, _QKV = "linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba", "linear_attn.in_proj_qkv"
# ``TensorNames.delta_inputs`` of Qwen3-Next, whose two projections have one key head after another, and of Qwen3.5.
INTERLEAVED_INPUTS = (
    (f"{_QKVZ}.queries", f"{_QKVZ}.keys", f"{_QKVZ}.values", f"{_QKVZ}.gates"),
    (f"{_BA}.betas", f"{_BA}.decays"),
)
SEPARATE_INPUTS = (
    (f"{_QKV}.queries", f"{_QKV}.keys", f"{_QKV}.values", "linear_attn.in_proj_z"),
    ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
)
_AROUND = {
    "attention_norm": "input_layernorm",
    "attention_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
_AFTER = {"attention_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}
NAMES = {
    "Exaone4ForCausalLM": TensorNames(norms=_AFTER),
    "Gemma2ForCausalLM": TensorNames(norms=_AROUND),
    "Gemma3ForCausalLM": TensorNames(norms=_AROUND),
    "Gemma4ForCausalLM": TensorNames(norms=_AROUND, router="router.proj", experts="experts"),
    "Gemma4UnifiedForCausalLM": TensorNames(norms=_AROUND),
    "GptOssForCausalLM": TensorNames(
        router="mlp.router", stacked_maps=("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    ),
    "HunYuanDenseV1ForCausalLM": TensorNames(q_norm="self_attn.query_layernorm", k_norm="self_attn.key_layernorm"),
    "MiniMaxM2ForCausalLM": TensorNames(
        router="block_sparse_moe.gate",
        experts="block_sparse_moe.experts",
        correction="block_sparse_moe.e_score_correction_bias",
        expert_maps=("w1", "w3", "w2"),
    ),
    "MixtralForCausalLM": TensorNames(
        router="block_sparse_moe.gate", experts="block_sparse_moe.experts", expert_maps=("w1", "w3", "w2")
    ),
    "OPTForCausalLM": TensorNames(
        prefix="model.decoder.",
        norm="final_layer_norm",
        norms={
            "attention_norm": "self_attn_layer_norm",
            "attention_out_norm": "self_attn_layer_norm",
            "mlp_norm": "final_layer_norm",
            "mlp_out_norm": "final_layer_norm",
        },
        out="self_attn.out_proj",
        up="fc1",
        down="fc2",
    ),
    "Olmo2ForCausalLM": TensorNames(norms=_AFTER),
    "Olmo3ForCausalLM": TensorNames(norms=_AFTER),
    "Qwen2MoeForCausalLM": TensorNames(shared_experts="mlp.shared_expert"),
    "Qwen3MoeForCausalLM": TensorNames(transposed_experts=True),  # those of Qwen3-VL
    "Qwen3NextForCausalLM": TensorNames(
        shared_experts="mlp.shared_expert", delta_inputs=INTERLEAVED_INPUTS, mtp="mtp."
    ),
    "Qwen3_5ForCausalLM": TensorNames(delta_inputs=SEPARATE_INPUTS, mtp="mtp."),
    "Qwen3_5MoeForCausalLM": TensorNames(shared_experts="mlp.shared_expert", delta_inputs=SEPARATE_INPUTS, mtp="mtp."),
    "Phi3ForCausalLM": TensorNames(qkv="self_attn.qkv_proj", gate_up="mlp.gate_up_proj"),
}


def names_of(architecture: str) -> TensorNames:
    """The names of an architecture: those of its entry in ``NAMES``, or else Llama's."""
    return NAMES.get(architecture, LLAMA)
