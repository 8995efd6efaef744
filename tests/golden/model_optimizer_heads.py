"""Writes ``model_optimizer.npz``: Domino, DSpark, LiLiCorr and DFlash heads of NVIDIA Model Optimizer, and what it computes.

    PYTHONPATH=FOLDER python tests/golden/model_optimizer_heads.py tests/golden/model_optimizer.npz

FOLDER is the unpacked wheel of nvidia-modelopt 0.48.0rc1, which tests do not install. ``README.md`` has what is stored."""

import json
import sys
import tempfile
from pathlib import Path

import modelopt.torch.speculative as speculative
import numpy as np
import torch
from modelopt.torch.speculative.plugins import modeling_dflash
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

V, D, BLOCK, MASK = 37, 16, 5, 36
SIZES = {"intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
STARTS = (9, 10, 14, 18)
LILICORR = {
    "projector_type": "lilicorr",
    "lilicorr_num_layers": 1,
    "lilicorr_num_heads": 2,
    "lilicorr_mlp_ratio": 1.5,
    "lilicorr_candidate_topk": 4,
    "lilicorr_factor_dim": 6,
    "lilicorr_vector_eps": 1e-3,
    "lilicorr_logit_scale": 7.0,
}
WIDER = {"lilicorr_hidden_size": 12, "lilicorr_num_layers": 2, "lilicorr_num_heads": 3, "lilicorr_candidate_topk": 6}
DSPARK = {"projector_type": "dspark", "markov_rank": 6}
CASES = {
    "domino": {"projector_type": "domino", "gru_hidden_dim": 10, "emb_dim": 12},
    "dspark-gated": {**DSPARK, "markov_head_type": "gated", "use_confidence_head": True},
    "dspark-rnn": {**DSPARK, "markov_head_type": "rnn"},
    "lilicorr": LILICORR,
    "lilicorr-convolved": {**LILICORR, **WIDER, "conv_kernel_size": 2, "conv_group_size": 4},
    "windows": {},
    "windows-causal": {},
}
WINDOW = {"dflash_swa_window_size": 6}
MORE = {"windows": WINDOW, "windows-causal": {**WINDOW, "dflash_draft_attention": "causal"}}
WEIGHTS = {"dflash_lilicorr_w_ce": 0.25, "dflash_lilicorr_w_margin": 0.0, "dflash_lilicorr_w_pen": 0.25}


def converted(architecture: dict, more: dict):
    """A random target with a random head of the tool's, every parameter of which counts."""
    # transformers 5.24 takes no device here.
    modeling_dflash._ROTARY_CLS = lambda config, device=None: Qwen3RotaryEmbedding(config)
    target = {"vocab_size": V, "hidden_size": D, "num_hidden_layers": 6, "max_position_embeddings": 64, **SIZES}
    config = {
        "dflash_block_size": BLOCK,
        "dflash_mask_token_id": MASK,
        "dflash_use_torch_compile": False,
        "dflash_architecture_config": {"num_hidden_layers": 2, **SIZES, **architecture},
        **(WEIGHTS if architecture.get("projector_type") == "lilicorr" else {}),
        **more,
    }
    model = speculative.convert(LlamaForCausalLM(LlamaConfig(**target)).float(), [("dflash", config)]).eval()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim > 1:
                parameter.copy_(noise * (0.3 if "kernel" in name else 2 if "lm_head" in name else 1) * D**-0.5)
            else:
                parameter.copy_(0.3 * noise if "bias" in name else 1 + 0.1 * noise)
    return model


def computed(model, tokens) -> dict[str, torch.Tensor]:
    """What the tool computes of the blocks at ``STARTS``, whose drafts are the text's own tokens."""
    starts, keep = torch.tensor([STARTS]), torch.ones(1, len(STARTS), dtype=torch.bool)
    N, S = len(STARTS), tokens.shape[1]
    streams = model._base_model(input_ids=tokens, output_hidden_states=True).hidden_states
    features = torch.cat([streams[k + 1] for k in model.target_layer_ids], dim=-1)
    window = model.dflash_swa_window_size
    hidden = model.dflash_module(
        noise_embedding=model._build_noise_embedding(tokens, starts, keep, N),
        target_hidden=features,
        position_ids=model._build_position_ids(S, starts, tokens.device),
        attention_mask=model._build_draft_attention_mask(S, starts, keep, N, torch.float32, tokens.device, window),
    )
    logits = model._base_model_lm_head(hidden)
    found = {f"S_{k + 1}": streams[k + 1][0] for k in model.target_layer_ids}
    found |= {"block_hidden": hidden.reshape(N, BLOCK, D), "base_logits": logits.reshape(N, BLOCK, V)}
    module = model.dflash_module
    if hasattr(module, "prefix_gru"):
        for module.pure_draft_prefix_len in (0, 1, 3):
            corrected = model._apply_domino_head(hidden, logits, tokens, starts, N).reshape(N, BLOCK, V)
            found[f"logits_{module.pure_draft_prefix_len}"] = corrected
        return found
    if hasattr(module, "markov_w1"):
        before = tokens[:, starts[0][:, None] + torch.arange(BLOCK)]
        added = module.compute_markov_bias(before, hidden.reshape(1, N, BLOCK, D))
        found["logits"] = found["base_logits"] + added[0]
        if module.use_confidence_head:
            found["confidence"] = module.compute_confidence_logits(before, hidden.reshape(1, N, BLOCK, D))[0]
        return found
    if not hasattr(module, "lilicorr"):
        return found
    drafting = logits.reshape(1, N, BLOCK, V)[:, :, 1:]
    values, candidates = torch.topk(drafting, module.lilicorr.candidate_topk)
    scores = module.score_lattice(
        candidate_token_ids=candidates,
        candidate_log_probs=values - torch.logsumexp(drafting, dim=-1, keepdim=True),
        pass_hidden=hidden.reshape(1, N, BLOCK, D)[:, :, 1:],
        embed_tokens=model._base_model_embeddings,
        target_hidden=features,
        anchor_positions=starts,
    )
    start, pair = module.lilicorr.compose_log_factors(start_scores=scores[0], pair_scores=scores[1])
    return found | {"candidates": candidates[0], "start": start[0], "pair": pair[0]}


def main(path: Path):
    tokens = torch.from_numpy(np.random.default_rng(1).integers(0, MASK, size=(1, 24)))
    arrays: dict[str, np.ndarray] = {}
    for case, architecture in CASES.items():
        torch.manual_seed(0)
        model = converted(architecture, MORE.get(case, {}))
        with tempfile.TemporaryDirectory() as folder, torch.no_grad():
            model.get_exporter().export(folder)
            found = {f"w.{name}": array for name, array in load_file(Path(folder) / "model.safetensors").items()}
            config = json.loads((Path(folder) / "config.json").read_text())
            found |= computed(model, tokens) | {"embed": model._base_model_embeddings.weight}
            found |= {"lm_head": model._base_model_lm_head.weight}
        arrays |= {f"{case}/{name}": array.numpy() for name, array in found.items()}
        arrays[f"{case}/config_json"] = np.array(json.dumps(config))
        arrays |= {f"{case}/token_ids": tokens[0].numpy(), f"{case}/starts": np.array(STARTS)}
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
