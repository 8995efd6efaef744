"""Draft heads of every layout: what they are recognised as, and that converting them loses nothing."""

import dataclasses

import numpy as np
import pytest
import tiny_heads as heads
from head_cases import ALL, same, write
from resaved import resave, set_keys
from safetensors.numpy import load_file, save_file
from tiny import tiny_checkpoint

from convert import Refusal, check, convert, load_draft, load_folder, read_draft_config, verifier_of
from convert.cli import main
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.config import ModelConfig
from jspec.config.heads import Eagle3Config, EagleConfig, MedusaConfig, MLPConfig, PardConfig
from jspec.models.params import abstract_params


@pytest.mark.parametrize(("file", "case"), ALL, ids=lambda part: part)
def test_converted_equals_direct(tmp_path, file, case):
    src, said, pickled = write(file, case, tmp_path / "src")
    report = convert(src, tmp_path / "out", verify="shapes", allow_pickle=pickled, dtype="float32", **said)
    config, params = load_draft(tmp_path / "out")
    assert config == read_draft_config(tmp_path / "out")
    assert check(tmp_path / "out") == []
    assert report.parameters == config.num_parameters == sum(array.size for array in params.values())
    assert {name: (array.shape, array.dtype) for name, array in params.items()} == {
        name: (leaf.shape, leaf.dtype) for name, leaf in abstract_params(config).items()
    }
    if not pickled:
        direct = load_draft(src, **said)
        assert direct[0] == config == read_draft_config(src, **said)
        same(params, direct[1])


@pytest.mark.parametrize(
    ("make", "keys", "line"),
    [
        (heads.eagle, {}, "EAGLE head, 1 layer, vocabulary 97"),
        (heads.eagle3, {}, "EAGLE-3 head, 1 layer, draft vocabulary 40 of 97"),
        (heads.eagle3, {"draft_vocab_size": 97}, "EAGLE-3 head, 1 layer, vocabulary 97"),
        (
            heads.speculators,
            {"verifier": "Qwen/Qwen3-8B", "eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            "EAGLE-3 head (speculators format), 1 layer, draft vocabulary 40 of 97, auxiliary layers 1, 3, 5, "
            "verifier Qwen/Qwen3-8B",
        ),
        (heads.p_eagle, {}, "P-EAGLE head, 2 layers, draft vocabulary 40 of 97"),
        (heads.pard, {}, "PARD model, LlamaForCausalLM, 2 layers, vocabulary 97"),
        (heads.mlp_speculator, {"tie_weights": True}, "MLP speculator, 3 stages, tied, vocabulary 97"),
        (heads.medusa, {}, "Medusa heads, 3 heads of 1 block, vocabulary 97"),
        (heads.medusa, {"version": "2"}, "Medusa heads, 3 heads of 1 block, the target's output head"),
        (tiny_checkpoint, {}, "LlamaForCausalLM, 2 layers, vocabulary 97"),
    ],
)
def test_the_command_prints_what_it_recognised(tmp_path, capsys, make, keys, line):
    src = make(tmp_path / "src", **keys)
    assert main([str(src), "--dry-run"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"recognised: {line}"
    assert main([str(src), str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.splitlines()[0] == f"recognised: {line}"


def test_each_layout_gives_its_config(tmp_path):
    eagle, _ = load_draft(heads.eagle(tmp_path / "eagle", num_key_value_heads=None, max_position_embeddings=None))
    assert isinstance(eagle, EagleConfig)
    assert eagle.fuse_bias
    assert eagle.own_embedding
    assert (eagle.layers.num_kv_heads, eagle.layers.max_position, eagle.layers.rope.theta) == (4, 2048, 10000.0)
    pard, _ = load_draft(heads.pard(tmp_path / "pard"))
    assert isinstance(pard, PardConfig)
    assert pard.mask_token_id == heads.MASK
    mlp, _ = load_draft(heads.mlp_speculator(tmp_path / "mlp", inner_dim=0, scale_input=True))
    assert mlp == MLPConfig(97, 64, 64, 3, scale_input=True)
    medusa, _ = load_draft(heads.medusa(tmp_path / "medusa", medusa_num_layers=2))
    assert medusa == MedusaConfig(97, 64, 3, 2)
    assert isinstance(load_draft(tiny_checkpoint(tmp_path / "model"))[0], ModelConfig)


def test_heads_are_counted_not_declared(tmp_path):
    src = heads.medusa(tmp_path / "src")
    set_keys(src, medusa_num_heads=5)
    assert read_draft_config(src).num_heads == 3


def test_layer_ids_need_a_convention(tmp_path):
    src = heads.eagle3(tmp_path / "src", eagle_config={"eagle_aux_hidden_state_layer_ids": [7, 1, 3]})
    with pytest.raises(Refusal, match=r"eagle_config.eagle_aux_hidden_state_layer_ids=\[7, 1, 3\].*--aux-convention"):
        read_draft_config(src)
    assert read_draft_config(src, aux_convention="input_of").aux_layers == (1, 3, 7)
    assert read_draft_config(src, aux_convention="output_of").aux_layers == (2, 4, 8)
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert main([str(src), str(tmp_path / "out"), "--aux-convention", "output_of"]) == 0
    assert read_draft_config(tmp_path / "out").aux_layers == (2, 4, 8)
    assert read_draft_config(tmp_path / "out", aux_convention="output_of").aux_layers == (2, 4, 8)
    with pytest.raises(Refusal, match="'input_of', but the draft head was converted with 'output_of'"):
        load_draft(tmp_path / "out", aux_convention="input_of")
    with pytest.raises(ValueError, match="aux_convention='inputs': expected None or one of input_of, output_of"):
        read_draft_config(src, aux_convention="inputs")


def test_no_ids_no_convention(tmp_path):
    assert read_draft_config(heads.eagle3(tmp_path / "src")).aux_layers is None
    assert read_draft_config(tmp_path / "src", aux_convention="output_of").aux_layers is None


def test_speculators_means_inputs(tmp_path):
    src = heads.speculators(tmp_path / "src", eagle_aux_hidden_state_layer_ids=[1, 6])
    assert read_draft_config(src).aux_layers == read_draft_config(src, aux_convention="input_of").aux_layers == (1, 6)
    with pytest.raises(Refusal, match="speculators format means the inputs"):
        read_draft_config(src, aux_convention="output_of")


@pytest.mark.parametrize(("kind", "theta", "positions"), [("llama", 10000.0, 2048), ("qwen3", 10000.0, 32768)])
def test_speculators_layers_are_a_diff(tmp_path, kind, theta, positions):
    """What transformer_layer_config leaves out is the default of its class, and the tensors tell the shape of heads."""
    left_out = ("num_key_value_heads", "head_dim", "max_position_embeddings")
    src = heads.speculators(tmp_path / "src", layers={"model_type": kind, "rms_norm_eps": 1e-5})
    whole = read_draft_config(src)
    set_keys(src, within="transformer_layer_config", **dict.fromkeys((*left_out, "rms_norm_eps"), ...))
    layers = read_draft_config(src).layers
    assert (layers.rms_norm_eps, layers.rope.theta, layers.max_position) == (1e-6, theta, positions)
    assert layers == dataclasses.replace(whole.layers, rms_norm_eps=1e-6, max_position=positions)


def test_draft_ids_are_the_rows_of_each_token(tmp_path):
    src = heads.eagle3(tmp_path / "src")
    d2t, t2d = (load_file(src / "model.safetensors")[name] for name in ("d2t", "t2d"))
    _, params = load_draft(src)
    assert params["draft_ids"].dtype == np.int32
    assert params["draft_ids"].shape == (97,)
    assert d2t.min() > 0  # read as ids instead of offsets, no row would be right
    for row, offset in enumerate(d2t):
        assert params["draft_ids"][row + offset] == row
    assert np.array_equal(params["draft_ids"] >= 0, t2d)


def test_draft_ids_stay_integers_in_any_dtype(tmp_path):
    src = heads.eagle3(tmp_path / "src", vocab_size=300, draft_vocab_size=290)  # bfloat16 holds integers up to 256
    exact = load_draft(src)[1]["draft_ids"]
    assert exact.max() == 289
    convert(src, tmp_path / "out", dtype="bfloat16")
    for path in (src, tmp_path / "out"):
        _, params = load_draft(path, "bfloat16")
        assert params["norm.weight"].dtype.name == "bfloat16"
        assert params["draft_ids"].dtype == np.int32
        assert np.array_equal(params["draft_ids"], exact)
    assert Checkpoint.open(src).hugging_face.exact_dtype == "float32"


@pytest.mark.parametrize("repeat", [False, True])
def test_tied_stages_listed_once_or_each(tmp_path, repeat):
    src = heads.mlp_speculator(tmp_path / "src", tie_weights=True, n_predict=4, repeat=repeat)
    config, params = load_draft(src)
    assert config.tied
    assert len(params) == 6
    same(params, load_draft(heads.mlp_speculator(tmp_path / "other", tie_weights=True, n_predict=4))[1])


def test_mlp_speculator_without_prefix(tmp_path):
    src = heads.mlp_speculator(tmp_path / "src")
    _, params = load_draft(src)
    resave(src, lambda name: name.removeprefix("speculator."))
    same(load_draft(src)[1], params)


@pytest.mark.parametrize("biases", [True, False])
def test_medusa_in_the_layout_of_vllm(tmp_path, biases):
    src = heads.medusa(tmp_path / "src", medusa_num_layers=2)
    _, params = load_draft(src)
    tensors = load_file(src / "medusa_lm_head.safetensors")
    renamed = {f"lm_heads.{i}.weight": tensors[f"{i}.2.weight"] for i in range(3)}
    kinds = ("weight", "bias") if biases else ("weight",)
    for i in range(3):
        renamed |= {f"blocks.{i}.layers.{j}.{k}": tensors[f"{i}.{j}.linear.{k}"] for j in range(2) for k in kinds}
    (src / "medusa_lm_head.safetensors").unlink()
    save_file(renamed, src / "model.safetensors")
    expected = params if biases else {n: a * 0 if n.endswith("bias") else a for n, a in params.items()}
    same(load_draft(src)[1], expected)


def test_medusa_with_a_prefix(tmp_path):
    src = heads.medusa(tmp_path / "src")
    _, params = load_draft(src)
    resave(src, lambda name: f"medusa_head.{name}")
    same(load_draft(src)[1], params)


def test_old_names_of_the_stream_norms(tmp_path):
    src = heads.eagle3(tmp_path / "src", fc_norm=True)
    config, params = load_draft(src)
    old = {f"fc_norm.{i}.weight": f"aux_norm_{name}.weight" for i, name in enumerate(("low", "mid", "high"))}
    resave(src, lambda name: old.get(name, name), use_aux_norm=True, fc_norm=None)
    assert load_draft(src)[0] == config
    same(load_draft(src)[1], params)


def test_buffers_are_ignored(tmp_path):
    buffer = {"layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
    src = resave(heads.eagle(tmp_path / "src"), add=buffer)
    same(load_draft(src)[1], load_draft(heads.eagle(tmp_path / "other"))[1])


def test_float16_becomes_float32(tmp_path):
    src = heads.eagle3(tmp_path / "src")
    tensors = load_file(src / "model.safetensors")
    half = {name: a.astype(np.float16) if a.dtype == np.float32 else a for name, a in tensors.items()}
    save_file(half, src / "model.safetensors")
    assert convert(src, tmp_path / "out").dtype == "float32"
    assert np.array_equal(load_draft(tmp_path / "out")[1]["norm.weight"], half["norm.weight"].astype(np.float32))


def test_a_head_is_no_target(tmp_path):
    src = heads.eagle3(tmp_path / "src", eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 7]})
    convert(src, tmp_path / "out", aux_convention="input_of")
    for path in (src, tmp_path / "out"):
        with pytest.raises(Refusal, match=r"draft head.*draft="):
            load_folder(path)


def test_pard_is_also_a_model(tmp_path):
    pytest.importorskip("torch")
    src = heads.pard(tmp_path / "src")
    convert(src, tmp_path / "out", verify="logits")
    for path in (src, tmp_path / "out"):
        pard, params = load_draft(path)
        model, same_params = load_folder(path)
        assert pard.model == model
        same(same_params, params)


def test_pickled_head(tmp_path):
    src = heads.eagle3(tmp_path / "src", file="pytorch_model.bin")
    assert main([str(src), str(tmp_path / "out")]) == 2
    assert main([str(src), str(tmp_path / "out"), "--allow-pickle"]) == 0
    same(load_draft(tmp_path / "out")[1], load_draft(heads.eagle3(tmp_path / "other"))[1])


def test_the_target_is_known_after_conversion(tmp_path):
    convert(heads.speculators(tmp_path / "src", verifier="Qwen/Qwen3-8B"), tmp_path / "out")
    assert verifier_of(tmp_path / "out") == verifier_of(tmp_path / "src") == "Qwen/Qwen3-8B"
    assert verifier_of(heads.eagle(tmp_path / "other")) is None


def test_auto_map_of_the_speculators_format_is_not_needed(tmp_path):
    src = heads.speculators(tmp_path / "src")
    set_keys(src, auto_map={"": "config.Eagle3SpeculatorConfig"})
    assert isinstance(read_draft_config(src), Eagle3Config)


def test_a_spare_output_head_beside_an_eagle_head_is_left_out(tmp_path, capsys):
    """As its authors' loader does: the target's own head is the one that serves."""
    src = resave(heads.eagle(tmp_path / "src"), add={"lm_head.weight": np.zeros((97, 64), np.float32)})
    assert main([str(src), "--dry-run"]) == 0
    assert "ignored: lm_head.weight" in capsys.readouterr().out
    same(load_draft(src)[1], load_draft(heads.eagle(tmp_path / "plain"))[1])
