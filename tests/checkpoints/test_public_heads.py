"""Public draft heads, most for mixtures of experts, as their publishers write them, on tiny targets of their families.

Each head has the keys of config.json and the tensors that the publisher's code writes; its sizes are small, and those that
are unequal in the published head are unequal here. The files on the hub themselves are not read. What it is that a head
computes, tests/convert/test_convert_heads.py compares with the original code."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from greedy_texts import drafted
from tiers import in_tiers
from tiny import tiny_checkpoint
from tiny_heads import NO_EMBEDDING, deepspec_eagle3, eagle, eagle3, p_eagle, speculators

import jspec
from convert.folders import read_draft_config
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.checkpoints.layouts.published import PUBLISHED

SMALL = {"max_batch": 2, "max_len": 48, "page_size": 16, "prefill_chunk": 16}
PROMPTS = [[5], [7, 8, 9] * 3]
LAYERS = {"num_hidden_layers": 8}
# Of gpt-oss, where the heads of the attention together are wider than the hidden states.
WIDE = {"head_dim": 24, "intermediate_size": 160}
MODELOPT = {"use_input_layernorm_in_first_layer": True, "use_last_layernorm": True, "use_mtp_layernorm": False}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Public(NamedTuple):
    """A published head.

    Attributes:
      names: of the repositories that have it in this form.
      target: the architecture of its target.
      write: ``(folder, **keys)``, which writes it.
      keys: of its config.json.
      said: what whoever loads it has to say, because config.json does not.
      reads: the layers whose outputs it reads; none for the hidden states behind the final norm.
    """

    names: str
    target: str
    write: Callable[..., Path]
    keys: dict[str, Any]
    said: dict[str, Any]
    reads: tuple[int, ...]


def ids(*layers: int, **more) -> dict[str, Any]:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(layers), "use_aux_hidden_state": True, **more}}


PUBLIC = [
    Public(
        "yuhuili/EAGLE-mixtral-instruct-8x7B",
        "MixtralForCausalLM",
        eagle,  # multi-head attention and rope_theta 1e4, unlike its target
        {"num_key_value_heads": None, "rms_norm_eps": 1e-6, **NO_EMBEDDING},
        {},
        (),
    ),
    Public(
        "AngelSlim/Qwen3-a3B_eagle3, Tengyunw/qwen3_30b_moe_eagle3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {"architectures": ["LlamaForCausalLMEagle3"], "head_dim": 24, "rope_theta": 1e6, **NO_EMBEDDING},
        {},
        (2, 4, 5),
    ),
    Public(
        "lmsys/Qwen3-235B-A22B-EAGLE3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {**ids(1, 2, 4), "head_dim": 24, **NO_EMBEDDING},
        {},
        (2, 3, 5),
    ),
    Public(
        "nvidia/Qwen3-235B-A22B-Eagle3",
        "Qwen3MoeForCausalLM",
        eagle3,
        {**ids(1, 2, 4, **MODELOPT), "rope_scaling": LLAMA3, **NO_EMBEDDING},
        {},  # Model Optimizer collects what the layers return
        (2, 3, 5),
    ),
    Public(
        "lmsys/EAGLE3-gpt-oss-120b-bf16",
        "GptOssForCausalLM",
        eagle3,
        {**ids(1, 2, 4), **WIDE, **NO_EMBEDDING},
        {},
        (2, 3, 5),
    ),
    Public(
        "nvidia/gpt-oss-120b-Eagle3-v3",
        "GptOssForCausalLM",
        eagle3,
        {**ids(4, 6, 8, **MODELOPT, norm_before_fc=True), **WIDE, "rope_scaling": LLAMA3, **NO_EMBEDDING},
        {"aux_convention": "input_of"},
        (4, 6, 8),  # the last is what the final norm reads
    ),
    Public(
        "nvidia/gpt-oss-120b-Eagle3-short-context, -v2",
        "GptOssForCausalLM",
        eagle3,
        {"eagle_config": {"use_aux_hidden_state": False, **MODELOPT}, **WIDE, **NO_EMBEDDING},
        {},
        (),
    ),
    Public(
        "RedHatAI/gpt-oss-20b-speculator.eagle3",
        "GptOssForCausalLM",
        speculators,
        {"norm_before_residual": True, "layers": WIDE},
        {},
        (2, 4, 5),
    ),
    Public(
        "Dogacel/specdrift-gpt-oss-20b-eagle3, -120b-eagle3",
        "GptOssForCausalLM",
        eagle3,
        {**WIDE, "norm_output": True, **NO_EMBEDDING},
        {"norm_output": "recycled"},
        (2, 4, 5),
    ),
    Public(
        "amazon/GPT-OSS-20B-P-EAGLE, gpt-oss-120b-p-eagle",
        "GptOssForCausalLM",
        p_eagle,
        {**WIDE, "num_hidden_layers": 4},
        {},
        (2, 4, 5),
    ),
    Public(
        "deepseek-ai/eagle3_qwen3_4b_ttt7, _8b_ttt7, _14b_ttt7",
        "Qwen3ForCausalLM",
        deepspec_eagle3,  # which says what its layer ids mean by the key that it has for them
        {},
        {},
        (1, 2, 3, 5, 6),
    ),
    Public(
        "heads of the speculators package for Gemma",
        "Gemma3ForCausalLM",
        speculators,
        {"draft_vocab_size": 97},
        {},
        (2, 4, 5),
    ),
]


# The head of each way of writing, and of each family of targets.
DRAFTING = [PUBLIC[i] for i in (0, 1, 5, 9, 10, 11)]


@pytest.mark.parametrize("head", PUBLIC, ids=lambda head: head.names.split(",")[0])
def test_a_public_head_reads_the_layers_that_it_was_trained_on(tmp_path, head):
    target = Checkpoint.open(tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)).target_config
    config = read_draft_config(head.write(tmp_path / "head", **head.keys), **head.said)
    assert config.resolved_aux_layers(target) == head.reads


@pytest.mark.parametrize("head", in_tiers(PUBLIC, test=DRAFTING), ids=lambda head: head.names.split(",")[0])
def test_a_public_head_drafts_for_its_target(tmp_path, head):
    """The greedy text stays that of the target."""
    target = tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)
    folder = head.write(tmp_path / "head", **head.keys)
    llm = jspec.load(target, folder, num_draft_tokens=3, **head.said, **SMALL)
    drafted(llm, PROMPTS, most=16)


@pytest.mark.parametrize("head", [head for head in PUBLIC if head.said], ids=lambda head: head.names.split(",")[0])
def test_settings_missing_in_config_json_are_required(tmp_path, head):
    target = tiny_checkpoint(tmp_path / "target", head.target, **LAYERS)
    with pytest.raises(ValueError, match=next(iter(head.said))):
        jspec.load(target, head.write(tmp_path / "head", **head.keys), **SMALL)


@pytest.mark.parametrize(
    ("repository", "keys", "expected"),
    [
        ("nvidia/gpt-oss-120b-Eagle3-v3", ids(24, 30, 36), {"aux_layers": (24, 30, 36)}),
        ("lmsys/EAGLE3-gpt-oss-120b-bf16", ids(1, 17, 33), {"aux_layers": (2, 18, 34)}),
        ("lmsys/Qwen3-235B-A22B-EAGLE3", ids(1, 46, 90), {"aux_layers": (2, 47, 91)}),
        ("Dogacel/specdrift-gpt-oss-20b-eagle3", {"norm_output": True}, {"norm_output": True}),
        ("Dogacel/specdrift-gpt-oss-120b-eagle3", {"norm_output": False}, {"norm_output": False}),
    ],
)
def test_settings_of_a_published_head_need_not_be_given(tmp_path, repository, keys, expected):
    organisation, name = repository.split("/")
    assert repository in PUBLISHED
    for place in (name, f"{organisation}/{name}", f"models--{organisation}--{name}/snapshots/0123abcd"):
        checkpoint = Checkpoint.open(eagle3(tmp_path / place, **keys))
        assert {field: getattr(checkpoint.config, field) for field in expected} == expected
        [note] = [note for note in checkpoint.hugging_face.layout.notes if repository in note]
        assert PUBLISHED[repository].source in note


def test_a_different_head_of_a_published_name_is_not_mistaken_for_it(tmp_path):
    for place, keys in (
        ("gpt-oss-120b-Eagle3-v3", ids(1, 17, 32, norm_before_fc=True)),
        ("my-gpt-oss-120b-Eagle3-v3", ids(24, 30, 36, norm_before_fc=True)),
        ("gpt-oss-120b-Eagle3-v3/checkpoint", ids(24, 30, 36, norm_before_fc=True)),
    ):
        with pytest.raises(OpenSetting, match="say which: --aux-convention"):
            read_draft_config(eagle3(tmp_path / place, **keys))
    given = read_draft_config(
        eagle3(tmp_path / "gpt-oss-120b-Eagle3-v3", **ids(24, 30, 36)), aux_convention="output_of"
    )
    assert given.aux_layers == (25, 31, 37)


def test_every_published_head_is_tried():
    tried = test_settings_of_a_published_head_need_not_be_given.pytestmark[0].args[1]
    assert {repository for repository, *_ in tried} == {name for name, head in PUBLISHED.items() if not head.disputed}
