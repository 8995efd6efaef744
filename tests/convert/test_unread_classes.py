"""Classes, code and tokenizers that are not read: what a user is told, and what is read all the same."""

import json
from pathlib import Path

import pytest
from tiny import tiny_config, tiny_tokenizer

from jspec.checkpoints.files.folder import Folder
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.huggingface.config import read_config
from jspec.checkpoints.huggingface.families import FAMILIES
from jspec.checkpoints.huggingface.multimodal import WRAPPERS
from jspec.checkpoints.huggingface.unread_classes import why_not
from jspec.checkpoints.tokenizer import load_tokenizer
from jspec.config import ModelConfig


def read(folder, config: dict) -> ModelConfig:
    (folder / "config.json").write_text(json.dumps(config))
    return read_config(Folder(folder))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("OlmoHybridForCausalLM", "recurrent state"),
        ("Qwen4ExpForConditionalGeneration", "hyper-connections and embeddings of n-grams"),
        ("Qwen4ExpForCausalLM", "hyper-connections and embeddings of n-grams"),
        ("DeepseekV4ForCausalLM", "attention to compressed keys"),
        ("DeepseekV32ForCausalLM", "chooses the keys of each query by an indexer"),
        ("GlmMoeDsaForCausalLM", "chooses the keys of each query by an indexer"),
        *(
            (f"{name}ForCausalLM", "recurrent state")
            for name in ("NemotronH", "Jamba", "Bamba", "FalconH1", "MiniMaxM1")
        ),
        *(
            (f"{name}ForCausalLM", "recurrent state")
            for name in ("GraniteMoeHybrid", "Zamba2", "KimiLinear", "MiniMax")
        ),
        *(
            (f"{name}ForCausalLM", "recurrent state")
            for name in ("BailingMoeLinearV2", "BailingMoeV2_5", "BailingHybrid", "Plamo2", "RWKV7", "xLSTM")
        ),
    ],
)
def test_a_class_that_is_not_read_is_told_what_is_missing(tmp_path, name, words):
    with pytest.raises(Refusal) as refusal:
        read(tmp_path, {**tiny_config(), "architectures": [name], "model_type": "other"})
    message = str(refusal.value)
    assert f"architectures=['{name}']: not read, because " in message
    assert words in message
    assert len(message.replace(str(tmp_path), "")) < 250
    assert not any(other in message for other in FAMILIES)


def test_every_class_of_transformers_with_a_state_is_read_or_told_what_is_missing():
    """Models whose layers keep more of a text than keys and values, as the code of transformers marks them."""
    transformers = pytest.importorskip("transformers")
    auto = transformers.models.auto
    stateful = set()
    for model_type, name in auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items():
        module = auto.configuration_auto.model_type_to_module_name(model_type)
        code = Path(transformers.__file__).parent / "models" / module / f"modeling_{module}.py"
        if code.exists() and "_is_stateful = True" in code.read_text():
            stateful.add(name)
    assert {"MambaForCausalLM", "Qwen3NextForCausalLM"} < stateful
    assert not [name for name in stateful - set(FAMILIES) if "not read" not in why_not(name, ())]


def test_classes_that_are_read_are_not_said_to_be_unread():
    for name in (*FAMILIES, *WRAPPERS):
        assert "not read" not in why_not(name, ())


def test_code_of_a_builtin_architecture_is_not_run(tmp_path):
    """Checkpoints of Phi-3 name code that computes what the transformers class does; it is neither run nor refused."""
    named = {"auto_map": {"AutoModelForCausalLM": "modeling_phi3.Phi3ForCausalLM"}}
    assert read(tmp_path, tiny_config("Phi3ForCausalLM", **named)) == read(tmp_path, tiny_config("Phi3ForCausalLM"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": {"AutoTokenizer": ["code.T", None]}}))
    with pytest.raises(Refusal, match=r"tokenizer_config\.json: auto_map asks for remote code"):
        read(tmp_path, tiny_config("Phi3ForCausalLM"))


def test_the_tokenizer_of_kimi_k2(tmp_path):
    """Its rules are code, so it is refused with what to do. Beside a tokenizer.json, the code is not needed."""
    named = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "model_type": "kimi_k2"}
    config = tiny_config("DeepseekV3ForCausalLM", **named)
    wanted = read(tmp_path, tiny_config("DeepseekV3ForCausalLM"))
    (tmp_path / "tiktoken.model").write_text("YQ== 0\n")
    settings = {"auto_map": {"AutoTokenizer": ["tokenization_kimi.TikTokenTokenizer", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(
        Refusal, match=r"tiktoken\.model: the rules .* write tokenizer\.json beside it .*models\.md shows"
    ):
        read(tmp_path, config)
    with pytest.raises(Refusal, match=r"tiktoken\.model: the rules of this tokenizer are Python code"):
        load_tokenizer(tmp_path)
    tiny_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**settings, "tokenizer_class": "TikTokenTokenizer"}))
    assert read(tmp_path, config) == wanted
    assert load_tokenizer(tmp_path).encode("ab") == [66, 67]
    with pytest.raises(Refusal, match=r"tokenizer_config\.json: auto_map asks for remote code"):
        read(tmp_path, tiny_config())
