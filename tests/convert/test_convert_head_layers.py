"""What the layers of a draft head may have: windows, biases, norms, and settings that have to be given."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
import tiny_heads as heads
from head_cases import reads_as, same
from resaved import resave
from tiny import tiny_checkpoint

from convert import Refusal, convert, load_draft, load_folder, read_draft_config
from convert.cli import main
from jspec.checkpoints.export import export_draft
from jspec.config.heads import Eagle3Config, EagleConfig
from jspec.models import build, build_head
from jspec.models.kv_cache import CausalView

T = 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return build(*load_folder(tiny_checkpoint(tmp_path_factory.mktemp("target"), num_hidden_layers=8)))


def inputs(target, head, seed=0):
    """Embedded tokens and features ``[1, T, ..]`` for a head that fuses three streams, and positions."""
    rng = np.random.default_rng(seed)
    tokens, features = rng.integers(97, size=(1, T)), rng.standard_normal((1, T, 192)).astype(np.float32)
    return head.embed(tokens, target), jnp.asarray(features), jnp.arange(T, dtype=jnp.int32)[None]


def hidden_of(head, embedded, fused, positions):
    return head(embedded, fused, positions, (None,) * len(head.cache_shape()), CausalView(positions))[0]


def close(found, expected):
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5, atol=1e-5)


# --- A prefix


WINDOWED = {"sliding_window": 4, "layer_types": ["sliding_attention"]}


@pytest.mark.parametrize("keys", [WINDOWED, {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 0}])
def test_a_window_of_the_head(tmp_path, target, keys):
    """A slot sees the last four slots only, so a pass over these alone gives the same."""
    config, params = load_draft(heads.eagle3(tmp_path / "src", **keys))
    assert config.layers.windows == (4,)
    head, plain = build_head(config, params), build_head(*load_draft(heads.eagle3(tmp_path / "plain")))
    embedded, features, positions = inputs(target, head)
    fused = head.fuse(features)
    hidden, full = (hidden_of(one, embedded, fused, positions) for one in (head, plain))
    for last in (5, T - 1):
        seen = slice(last - 3, last + 1)
        alone = hidden_of(plain, embedded[:, seen], fused[:, seen], positions[:, seen])
        close(hidden[:, last], alone[:, -1])
        assert np.abs(np.asarray(hidden[:, last] - full[:, last])).max() > 1e-3


@pytest.mark.parametrize(
    "keys",
    [
        {"sliding_window": 4},  # left over from a target's config
        {"sliding_window": 4, "use_sliding_window": False, "max_window_layers": 0},
        {"sliding_window": 4, "layer_types": ["full_attention"]},
    ],
)
def test_a_window_that_is_switched_off(tmp_path, keys):
    assert read_draft_config(heads.eagle3(tmp_path / "src", **keys)).layers.windows == (None,)


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_windows_in_the_speculators_format(tmp_path, kind):
    mixed = {"num_hidden_layers": 2, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"]}
    config, params = load_draft(heads.speculators(tmp_path / "src", kind, layers=mixed))
    assert config.layers.windows == (5, None)
    export_draft(tmp_path / "out", config, params, target_name="t", dtype="float32")
    again, back = load_draft(tmp_path / "out")
    assert again == config
    same(back, params)
    two = dataclasses.replace(config, layers=dataclasses.replace(config.layers, windows=(5, 6)))
    with pytest.raises(ValueError, match=r"windows=\(5, 6\): expected one width"):
        export_draft(tmp_path / "two", two, params, target_name="t")


def biases(layer, out=False):
    """Biases of query, key and value, and of the output map if ``out``."""
    rows = {"q_proj": 64, "k_proj": 32, "v_proj": 32, **({"o_proj": 64} if out else {})}
    rng = np.random.default_rng(3)
    return {f"{layer}self_attn.{n}.bias": 0.1 * rng.standard_normal(m).astype(np.float32) for n, m in rows.items()}


def test_layers_of_the_type_qwen2(tmp_path, target):
    """Biases on the way into the attention and none on its way out."""
    added = biases("layers.0.")
    folder = resave(heads.speculators(tmp_path / "src", layers={"model_type": "qwen2"}), add=added)
    config, params = load_draft(folder)
    assert (config.layers.qkv_bias, config.layers.output_bias, config.layers.qk_norm) == (True, False, False)
    zero = {"layers.0.self_attn.o_proj.bias": np.zeros(64, np.float32)}
    llama = resave(heads.speculators(tmp_path / "llama"), add={**added, **zero})
    found, expected = (build_head(*load_draft(path)) for path in (folder, llama))
    embedded, features, positions = inputs(target, found)
    close(*(hidden_of(head, embedded, head.fuse(features), positions) for head in (found, expected)))
    export_draft(tmp_path / "out", config, params, target_name="t", dtype="float32")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["transformer_layer_config"]["model_type"] == "qwen2"
    again, back = load_draft(tmp_path / "out")
    assert again == config
    same(back, params)


def test_native_layers_of_the_type_qwen2(tmp_path):
    folder = resave(heads.eagle3(tmp_path / "src", model_type="qwen2"), add=biases("midlayer."))
    layers = read_draft_config(folder).layers
    assert (layers.qkv_bias, layers.output_bias) == (True, False)
    eagle = resave(heads.eagle(tmp_path / "eagle", model_type="qwen2"), add=biases("layers.0."))
    assert read_draft_config(eagle).layers.qkv_bias


# --- Around the layers


def test_a_bias_of_the_fusing_map(tmp_path, target):
    bias = 0.1 * np.random.default_rng(5).standard_normal(64).astype(np.float32)
    folder = resave(heads.eagle3(tmp_path / "src"), add={"fc.bias": bias})
    config, params = load_draft(folder)
    assert config == dataclasses.replace(read_draft_config(heads.eagle3(tmp_path / "plain")), fuse_bias=True)
    assert config.num_parameters == sum(array.size for array in params.values())
    assert read_draft_config(resave(folder, bias=True)) == config
    assert not read_draft_config(resave(tmp_path / "plain", bias=True)).fuse_bias  # left over from an EAGLE config
    head, plain = build_head(config, params), build_head(*load_draft(tmp_path / "plain"))
    embedded, features, positions = inputs(target, head)
    expected = plain.logits(
        hidden_of(plain, embedded, plain.fuse(features) + bias.reshape(1, 1, -1), positions), target
    )
    close(head.logits(hidden_of(head, embedded, head.fuse(features), positions), target), expected)
    convert(folder, tmp_path / "converted")
    assert load_draft(tmp_path / "converted")[0] == config
    stated = dataclasses.replace(config, trained_drafts=3)
    with pytest.raises(ValueError, match="fuse_bias=True: expected False, because the speculators format"):
        export_draft(tmp_path / "out", stated, params, target_name="t")


def test_a_head_without_a_final_norm(tmp_path, target):
    keys = {"eagle_config": {"use_last_layernorm": False}, "leave_out": ("norm.weight",)}
    config, params = load_draft(heads.eagle3(tmp_path / "src", **keys))
    assert config == dataclasses.replace(read_draft_config(heads.eagle3(tmp_path / "plain")), norm_before_head=False)
    assert config.num_parameters == sum(array.size for array in params.values())
    head, plain = build_head(config, params), build_head(*load_draft(tmp_path / "plain"))
    embedded, features, positions = inputs(target, head)
    hidden = hidden_of(head, embedded, head.fuse(features), positions)
    close(hidden, hidden_of(plain, embedded, plain.fuse(features), positions))
    close(head.logits(hidden, target), hidden @ params["head.weight"].T)
    assert head.recycle(hidden) is hidden
    convert(tmp_path / "src", tmp_path / "converted", verify="shapes")
    assert load_draft(tmp_path / "converted")[0] == config
    stated = dataclasses.replace(config, trained_drafts=3)
    with pytest.raises(ValueError, match="norm_before_head=False: expected True, because the speculators format"):
        export_draft(tmp_path / "out", stated, params, target_name="t")


def test_a_mask_token_in_digits(tmp_path):
    assert read_draft_config(heads.p_eagle(tmp_path / "src", ptd_token_id="5")).mask_token_id == 5


def test_mask_token_id_is_taken_from_the_option(tmp_path, capsys):
    src, out = str(heads.p_eagle(tmp_path / "src", ptd_token_id=None)), str(tmp_path / "out")
    with pytest.raises(Refusal, match=r"--mask-token-id \(mask_token_id=\)"):
        read_draft_config(src)
    with pytest.raises(Refusal, match=r"mask_token_id=97: expected None or in 0..96"):
        read_draft_config(src, mask_token_id=97)
    reads_as(tmp_path / "src", heads.p_eagle(tmp_path / "plain"), tmp_path, mask_token_id=heads.MASK)
    assert main([src, out]) == 2
    with pytest.raises(SystemExit):
        main([src, out, "--mask-token-id", "-1"])
    assert main([src, out, "--mask-token-id", "5"]) == 0
    assert load_draft(out)[0] == load_draft(out, mask_token_id=5)[0]
    with pytest.raises(Refusal, match="mask_token_id=6, but the draft head was converted with 5"):
        load_draft(out, mask_token_id=6)
    with pytest.raises(Refusal, match="mask_token_id=6, but ptd_token_id says 5"):
        read_draft_config(tmp_path / "plain", mask_token_id=6)
    for other in (heads.eagle3, heads.eagle, tiny_checkpoint):
        with pytest.raises(Refusal, match="mask_token_id=5 is for P-EAGLE heads, and this is none"):
            read_draft_config(other(tmp_path / other.__name__), mask_token_id=5)


@pytest.mark.parametrize("make", [heads.eagle, heads.eagle3, heads.medusa, heads.mlp_speculator])
def test_code_that_a_head_does_not_need(tmp_path, capsys, make):
    folder = resave(make(tmp_path / "src"), auto_map={"AutoModel": "modeling.Head"})
    (folder / "modeling.py").write_text("raise SystemExit('run')")
    report = reads_as(folder, make(tmp_path / "plain"), tmp_path)
    [note] = [note for note in report.notes if "auto_map" in note]
    assert note.startswith("config.json names code of its own (auto_map), which the weights of ")
    assert main([str(folder), "--dry-run"]) == 0
    assert f"note: {note}" in capsys.readouterr().out.splitlines()


def test_code_of_a_model_is_refused(tmp_path):
    for make in (heads.pard, tiny_checkpoint):
        folder = make(tmp_path / make.__name__)
        with pytest.raises(Refusal, match="remote code"):
            read_draft_config(resave(folder, auto_map={"AutoModel": "modeling.Model"}))


def test_a_medusa_vocabulary_that_is_cut_to_its_whole(tmp_path):
    reads_as(heads.medusa(tmp_path / "src", truncated_vocab_size=97), heads.medusa(tmp_path / "plain"), tmp_path)


def test_an_mlp_speculator_that_names_its_recurrence(tmp_path):
    src = heads.mlp_speculator(tmp_path / "src", method="sum_rnn")
    reads_as(src, heads.mlp_speculator(tmp_path / "plain"), tmp_path)


# --- What norm_output means


MEANINGS = {
    (True, "recycled"): {"norm_output": True},
    (True, "before_head"): {},
    (False, "recycled"): {},
    (False, "before_head"): {"norm_before_head": False},
}


@pytest.mark.parametrize(("value", "meaning"), MEANINGS)
def test_norm_output_needs_a_meaning(tmp_path, target, value, meaning):
    src, out = heads.eagle3(tmp_path / "src", norm_output=value), tmp_path / "out"
    with pytest.raises(Refusal) as refusal:
        read_draft_config(src)
    for words in (f"norm_output={value}", "fed back", "output head reads", "--norm-output recycled or before_head"):
        assert words in str(refusal.value)
    assert main([str(src), str(out)]) == 2
    assert main([str(src), str(out), "--norm-output", meaning]) == 0
    config, params = load_draft(src, norm_output=meaning)
    plain_config, plain = load_draft(heads.eagle3(tmp_path / "plain"))
    assert isinstance(plain_config, Eagle3Config)
    assert config == dataclasses.replace(plain_config, **MEANINGS[value, meaning])
    assert load_draft(out)[0] == config == read_draft_config(out, norm_output=meaning)
    other = {"recycled": "before_head", "before_head": "recycled"}[meaning]
    with pytest.raises(Refusal, match=f"norm_output='{other}', but the draft head was converted with '{meaning}'"):
        load_draft(out, norm_output=other)

    head, norm = build_head(config, params), plain["norm.weight"]
    embedded, features, positions = inputs(target, head)
    hidden = hidden_of(head, embedded, head.fuse(features), positions)
    root = np.sqrt(np.mean(np.square(hidden), axis=-1, keepdims=True) + 1e-5)
    normed = np.asarray(hidden) / root * norm.reshape(1, 1, -1)
    read = np.asarray(hidden) if (value, meaning) == (False, "before_head") else normed
    close(head.logits(hidden, target), read @ plain["head.weight"].T)
    close(head.recycle(hidden), normed if (value, meaning) == (True, "recycled") else hidden)


def test_where_norm_output_is_settled(tmp_path):
    """Nothing has to be said where the key is absent, the format says it or nothing is fed back, and nothing else may
    be."""
    assert read_draft_config(heads.p_eagle(tmp_path / "masks", norm_output=True)).norm_before_head
    with pytest.raises(Refusal, match="norm_output=False can mean"):
        read_draft_config(heads.p_eagle(tmp_path / "masks", norm_output=False))
    assert not read_draft_config(heads.eagle3(tmp_path / "absent")).norm_output
    assert not read_draft_config(tmp_path / "absent", norm_output="recycled").norm_output
    said = heads.speculators(tmp_path / "speculators", norm_output=True)
    assert read_draft_config(said).norm_output
    assert read_draft_config(said, norm_output="recycled").norm_output
    with pytest.raises(Refusal, match="speculators format means that the normed output is fed back"):
        read_draft_config(said, norm_output="before_head")
    eagle = heads.eagle(tmp_path / "eagle")
    convert(eagle, tmp_path / "converted")
    for path in (eagle, tmp_path / "converted"):
        assert isinstance(read_draft_config(path), EagleConfig)
        with pytest.raises(Refusal, match="norm_output='recycled' is for EAGLE-3 heads"):
            read_draft_config(path, norm_output="recycled")
    with pytest.raises(ValueError, match="norm_output='fed_back': expected None or one of recycled, before_head"):
        read_draft_config(said, norm_output="fed_back")
