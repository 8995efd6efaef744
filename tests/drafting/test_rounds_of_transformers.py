"""Rounds of an engine equal those of transformers' own speculative decoding, from folders that transformers wrote: the
greedy text, and the logits of every draft.

transformers 5.24 drafts with layers for multi-token prediction, each of which makes one draft, with DFlash heads and with
assistants. It has no EAGLE, Medusa, MLP speculator or DSpark."""

from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from assistant_checkpoints import CLUSTERED, assistant_of, target_of
from hybrid_checkpoints import save_hybrid
from mtp_checkpoints import by_transformers as with_mtp_layers
from parity_cases import CASES, SIZES
from recorded_rounds import Rounds, by_jspec, by_transformers, difference
from resaved import resave
from tiers import in_tiers

import jspec

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PROMPT, MOST = list(range(3, 20)), 24
ASSISTED = "SinglePositionMultiTokenCandidateGenerator"
NEAR = 1e-5  # of the largest logit
# With recurrent states; and with assistants, whose float32 in transformers is up to 2.8e-5 from its float64 in these rounds.
NEARLY = 2e-5
HOW = {"max_batch": 1, "max_len": 64, "page_size": 16, "prefill_chunk": 64, "dtype": "float32"}


def rounds_of(target, draft, num_draft_tokens: int) -> Rounds:
    load = lambda: jspec.load(target, draft, num_draft_tokens=num_draft_tokens, compilation_cache=False, **HOW)  # noqa: E731
    return by_jspec(load, PROMPT, MOST)


def assert_equal(found: Rounds, wanted: Rounds, least: int, near: float = NEAR):
    """The same text, and in at least so many rounds that both had, the same logits of all drafts."""
    assert found.tokens == wanted.tokens
    rounds, apart = difference(found, wanted)
    assert rounds >= least
    assert apart < near


def mtp_of_transformers(folder: Path, family: str, settings: dict) -> Rounds:
    """The rounds of ``generate(use_mtp=True)`` from the folder, which this writes."""
    with_mtp_layers(folder, family, settings, 1)
    kind = getattr(transformers, f"{family}ForCausalLM")
    # transformers knows by the numbers that they have in published checkpoints which layers are for multi-token prediction.
    behind = rf"model\.layers\.{SIZES['num_hidden_layers']}\."
    with mock.patch.object(kind, "_keys_to_ignore_on_load_unexpected", [behind]):
        model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
        if not hasattr(model.config, "num_mtp_layers"):  # of GLM-4.7-Flash, whose settings transformers does not know
            model.config.num_mtp_layers, model.config.mtp_mlp_layer_types = 1, ["sparse"]
        return by_transformers(model, "MTPCandidateGenerator", PROMPT, MOST, use_mtp=True)


@pytest.mark.parametrize(
    "case", in_tiers(["deepseek", "deepseek-yarn", "glm", "glm4-moe", "glm4-moe-air"], test=["glm4-moe"])
)
def test_multi_token_prediction(tmp_path, case):
    wanted = mtp_of_transformers(tmp_path, *CASES[case])
    assert_equal(rounds_of(tmp_path, "mtp", 1), wanted, least=15)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("case", "more"),
    [
        ("qwen3.5", {}),
        ("qwen3.5-tied", {}),
        ("qwen3.5-yarn", {}),
        ("qwen3.5-moe", {}),
        ("qwen3-next", {"mlp_only_layers": [1]}),  # where its one layer for multi-token prediction has experts
    ],
)
def test_multi_token_prediction_beside_recurrent_states(tmp_path, case, more):
    """transformers does not speculate with such targets, and has no setting for their layer. Told that there is one, it
    reads it from their checkpoint and computes it, here over the whole text at once, in float64."""
    from transformers.modeling_layers import MtpModel

    kind = type(save_hybrid(tmp_path, case, **more).model)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = kind.from_pretrained(tmp_path, **eager, dtype=torch.float64)
    model.config.num_mtp_layers, model.config.mtp_layer_types = 1, ["full_attention"]
    mtp = MtpModel.from_pretrained(model)
    how = {"max_new_tokens": MOST, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        text = model.generate(torch.tensor([PROMPT]), **how)
        hidden = model.model(text, use_cache=False).last_hidden_state[:, :-1]
        positions = torch.arange(1, text.shape[1])[None]
        logits = model.lm_head(mtp.forward_layer(0, hidden, positions, None, input_ids=text[:, 1:]))[0].numpy()
    drafts = {i + 2: logits[i : i + 1] for i in range(len(logits))}  # behind slot i, which reads token i + 1
    wanted = Rounds(text[0, len(PROMPT) :].tolist(), drafts)
    assert_equal(rounds_of(tmp_path, "mtp", 1), wanted, least=15, near=NEARLY)


def dflash_of_transformers(folder: Path, window: int | None) -> Rounds:
    """The rounds of a DFlash head, and folders ``target`` and ``head`` of both models. The only class of such heads that
    transformers has is Muse Glimmer's, which has other names than z-lab's, and the same equations. In a window of W tokens
    there is one more, because each slot sees W before its own (findings/transformers-dflash-window.sh)."""
    settings = {**SIZES, **CASES["qwen3"][1], "num_hidden_layers": 8}
    target = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**settings))
    sizes = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    config = transformers.MuseGlimmerAssistantConfig(
        **{name: SIZES[name] for name in sizes},
        num_hidden_layers=2,
        layer_types=["full_attention" if window is None else "sliding_attention"] * 2,
        sliding_window=window or 2048,
        block_size=5,
        mask_token_id=96,
        target_layer_ids=[1, 3, 6],
        max_position_embeddings=128,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4},
    )
    head, models = transformers.MuseGlimmerAssistantModel(config), {}
    torch.manual_seed(1)
    for name, model in (("target", target), ("head", head)):
        with torch.no_grad():
            for at, parameter in model.named_parameters():
                noise = torch.randn_like(parameter)
                parameter.copy_(1 + 0.1 * noise if "norm" in at else parameter.shape[-1] ** -0.5 * noise)
        model.save_pretrained(folder / name)
        models[name] = type(model).from_pretrained(folder / name, attn_implementation="eager")
    how = {"assistant_model": models["head"], "speculation_type": "dflash"}
    rounds = by_transformers(models["target"], "DFlashTokenCandidateGenerator", PROMPT, MOST, **how)
    windows = {} if window is None else {"use_swa": True, "swa_window_size": window + 1}
    resave(
        folder / "head",
        lambda name: name.replace("encoder.fc.", "fc.").replace("encoder.output_norm_enc.", "hidden_norm."),
        architectures=["DFlashDraftModel"],
        model_type="qwen3",
        vocab_size=SIZES["vocab_size"],
        dflash_config={"mask_token_id": config.mask_token_id, "target_layer_ids": config.target_layer_ids, **windows},
        layer_types=...,
        mask_token_id=...,
        target_layer_ids=...,
    )
    return rounds


@pytest.mark.parametrize("window", [None, 8])
def test_dflash(tmp_path, window):
    wanted = dflash_of_transformers(tmp_path, window)
    assert_equal(rounds_of(tmp_path / "target", tmp_path / "head", 4), wanted, least=15)


@pytest.mark.nightly
@pytest.mark.parametrize(("kind", "more"), [("large", {}), ("small", CLUSTERED)], ids=["large", "small"])
def test_assistants(tmp_path, kind, more):
    """Of each length, the first round of a text of transformers' own, in float64: in later ones it shows the assistant keys
    of refused drafts (findings/transformers-assistant-refused-keys.sh)."""
    target_of(tmp_path / "target", kind)
    assistant_of(tmp_path / "assistant", kind, **more)
    how = {"attn_implementation": "eager", "dtype": torch.float64}
    target = transformers.Gemma4ForCausalLM.from_pretrained(tmp_path / "target", **how)
    assistant = transformers.Gemma4AssistantForCausalLM.from_pretrained(tmp_path / "assistant", **how)
    assistant.generation_config.num_assistant_tokens = 3
    found = rounds_of(tmp_path / "target", tmp_path / "assistant", 3)
    text, firsts = [*PROMPT, *found.tokens], {}
    for length in sorted(found.logits.keys() - {len(PROMPT)})[:-4]:
        begun = text[: length - 1]  # of which the first round begins behind the next token
        rounds = by_transformers(target, ASSISTED, begun, 5, assistant_model=assistant)
        firsts[length] = rounds.logits[length]
    scored = {length: np.where(np.isfinite(found.logits[length]), logits, -np.inf) for length, logits in firsts.items()}
    plain = target.generate(
        torch.tensor([PROMPT]), max_new_tokens=MOST, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert_equal(found, Rounds(plain[0, len(PROMPT) :].tolist(), scored), least=10, near=NEARLY)
