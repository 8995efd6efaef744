"""A converted folder has the scheme and the scales of its original's FP8 cache, so that both write the same text."""

import json
import warnings

import numpy as np
import pytest
from fp8_checkpoints import fp8_checkpoint
from rounded_caches import OF_CACHE_ALONE, SCHEME, TOKENS, K, V, checkpoint, chosen, rounding_of
from tiny import tiny_checkpoint

import jspec
from convert import Refusal, convert, export_quantized
from convert.cli import main
from jspec.checkpoints.converted.manifest import NAME, own_digest
from jspec.models.cache_pools import KVRounding

ONE = np.float32([0.0213])
NAMES = {
    "a head": ("self_attn.k_scale", "self_attn.v_scale", (K, V)),
    "a layer": ("self_attn.k_proj.k_scale", "self_attn.v_proj.v_scale", (ONE, 3 * ONE)),
    "both": ("self_attn.kv_scale", "self_attn.kv_scale", (V, V)),
}


def rewritten(folder, **changes):
    """The folder with other entries in its manifest, or without those that are ``...``, and with the digest of that."""
    manifest = json.loads((folder / NAME).read_text()) | changes
    manifest = {key: value for key, value in manifest.items() if value is not ...}
    manifest["manifest_sha256"] = own_digest(manifest)
    (folder / NAME).write_text(json.dumps(manifest))
    return folder


def with_scales(folder, change):
    """The converted folder after ``change`` of the object of scales in its manifest."""
    entry = json.loads((folder / NAME).read_text())["kv_cache"]
    return rewritten(folder, kv_cache={**entry, "scales": change(entry["scales"])})


@pytest.mark.parametrize("case", NAMES)
def test_scales_are_those_of_the_original(tmp_path, case):
    src = checkpoint(tmp_path / "src", *NAMES[case])
    report = convert(src, tmp_path / "out")
    assert rounding_of(report.out) == rounding_of(src)
    kept = (
        f"kept in manifest.json: {2 if case == 'both' else 4} scales of keys and values; the folder turns on a cache in"
    )
    assert kept in str(report.notes)
    with pytest.warns(
        UserWarning, match=r"manifest.json: kv_cache_scheme=.*: keys and values are cached in FP8, with the"
    ):
        assert chosen(report.out) == "fp8"
    assert chosen(report.out, "float32") == "float32"


def test_both_write_the_same_text(tmp_path, capsys):
    src = checkpoint(tmp_path / "src")
    assert main([str(src), str(tmp_path / "out")]) == 0
    assert "note: kept in manifest.json: 4 scales of keys and values; the folder turns on" in capsys.readouterr().out
    texts, logits = [], []
    for folder in (src, tmp_path / "out"):
        with pytest.warns(UserWarning, match="cached in FP8"):
            llm = jspec.load(folder, max_len=64, max_batch=1, dtype="float32")
        result = llm.generate(
            TOKENS[0, :9].tolist(), jspec.SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
        )
        texts.append(result.token_ids)
        logits.append(np.asarray(llm.logits(TOKENS[0].tolist())))
    assert texts[0] == texts[1]
    np.testing.assert_array_equal(*logits)
    plain = jspec.load(tmp_path / "out", max_len=64, max_batch=1, dtype="float32", kv_cache_dtype="float32")
    assert np.abs(np.asarray(plain.logits(TOKENS[0].tolist())) - logits[1]).max() > 1e-3


def test_cache_scales_in_the_file_of_model_optimizer_are_kept(tmp_path):
    src = checkpoint(tmp_path / "src", said=None)
    described = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}
    (src / "hf_quant_config.json").write_text(json.dumps(described))
    out = convert(src, tmp_path / "out").out
    assert not (out / "hf_quant_config.json").exists()
    with pytest.warns(UserWarning, match="kv_cache_quant_algo='FP8': keys and values are cached in FP8"):
        assert chosen(out) == "fp8"
    assert rounding_of(out) == rounding_of(src)


def test_scales_without_a_scheme_count_for_those_who_ask(tmp_path):
    src = checkpoint(tmp_path / "src", said=None)
    out = convert(src, tmp_path / "out").out
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(out) == "float32"
        assert rounding_of(out) == rounding_of(src)


def test_other_schemes_are_named_as_those_of_the_original(tmp_path):
    src = checkpoint(tmp_path / "src", said={**OF_CACHE_ALONE, "kv_cache_scheme": {**SCHEME, "num_bits": 4}})
    out = convert(src, tmp_path / "out").out
    with pytest.warns(UserWarning, match="'num_bits': 4.*: jspec does not read that, so the cache has the dtype"):
        assert chosen(out) == "float32"


def test_a_model_whose_weights_are_quantised_keeps_them(tmp_path):
    out = convert(checkpoint(tmp_path / "src"), tmp_path / "out", quantize="int8").out
    assert rounding_of(out) == rounding_of(tmp_path / "src")
    said = json.loads((fp8_checkpoint(tmp_path / "fp8") / "config.json").read_text())["quantization_config"]
    src = fp8_checkpoint(tmp_path / "stored", quantization={**said, "kv_cache_scheme": SCHEME})
    with pytest.warns(UserWarning, match="cached in FP8"):
        assert chosen(convert(src, tmp_path / "out2").out) == "fp8"


@pytest.mark.parametrize("bad", [np.nan, np.inf, 0.0, -0.5])
def test_scales_that_are_none_are_refused_by_their_name(tmp_path, bad):
    src = checkpoint(tmp_path / "src", scales=(K, np.float32([bad])))
    with pytest.raises(Refusal, match=r"tensor 'model.layers.0.self_attn.v_scale' holds .*: expected positive numbers"):
        convert(src, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_scales_of_a_cache_are_left_out_where_nothing_asks_for_them(tmp_path):
    src = checkpoint(tmp_path / "src", scales=(K, np.float32([-1])), said=None)
    report = convert(src, tmp_path / "out")
    [note] = [note for note in report.notes if "left out" in note]
    assert "v_scale' holds -1.0: expected positive numbers" in note
    with pytest.warns(UserWarning, match=r"holds no 'model.layers.0.self_attn.k_scale', nor 3 other scales"):
        assert rounding_of(report.out) == (KVRounding((1.0, 1.0), (1.0, 1.0)),) * 2


VALUE = "model.layers.1.self_attn.v_scale"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda scales: {**scales, VALUE: [1.0, -2.0]}, rf"tensor '{VALUE}' holds -2.0: expected positive numbers"),
        (lambda scales: {**scales, VALUE: [1e60, 1.0]}, rf"tensor '{VALUE}' holds inf: expected positive numbers"),
        (
            lambda scales: {**scales, VALUE: [1.0] * 3},
            rf"manifest.json: tensor '{VALUE}' has shape \[3\]: expected one",
        ),
        (lambda scales: {**scales, VALUE: []}, rf"manifest.json: tensor '{VALUE}' has shape \[0\]: expected one"),
        (lambda scales: {**scales, VALUE: ["1"]}, r"manifest.json: kv_cache.scales=.*: expected an object of names"),
        (lambda scales: {**scales, VALUE: 1.0}, r"manifest.json: kv_cache.scales=.*: expected an object of names"),
        (
            lambda scales: {**scales, VALUE: [10**400]},
            r"manifest.json: kv_cache.scales=.*: expected an object of names",
        ),
        (lambda scales: [1.0], r"manifest.json: kv_cache.scales=.*: expected an object of names"),
        (lambda scales: None, r"manifest.json: kv_cache.scales=None: expected an object of names"),
    ],
)
def test_manifests_that_hold_no_scales_are_refused_by_name(tmp_path, change, message):
    out = with_scales(convert(checkpoint(tmp_path / "src"), tmp_path / "out").out, change)
    with pytest.raises(Refusal, match=message):
        jspec.load(out, kv_cache_dtype="fp8")


def test_an_entry_that_is_no_object_is_refused(tmp_path):
    out = rewritten(convert(tiny_checkpoint(tmp_path / "src"), tmp_path / "out").out, kv_cache=[1])
    with pytest.raises(Refusal, match=r"manifest.json: kv_cache=\[1\]: expected an object or null"):
        jspec.load(out)


def test_folders_of_earlier_versions_are_read_as_they_were_and_named(tmp_path):
    out = rewritten(convert(checkpoint(tmp_path / "src"), tmp_path / "out").out, kv_cache=...)
    with pytest.warns(UserWarning, match=r"config.json: kv_cache_scheme=.*converted without the scales of that.*again"):
        assert chosen(out) == "float32"
    plain = rewritten(convert(tiny_checkpoint(tmp_path / "plain"), tmp_path / "out2").out, kv_cache=...)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(plain) == "float32"


@pytest.mark.parametrize("algorithm", [None, "FP8"])
def test_an_export_for_other_engines_keeps_them(tmp_path, algorithm):
    said = OF_CACHE_ALONE
    if algorithm is not None:
        said = {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": algorithm}
    src = checkpoint(tmp_path / "src", said=said, hidden_size=32, intermediate_size=64)
    out = export_quantized(src, tmp_path / "out", "int8")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["kv_cache_scheme"] == SCHEME
    assert rounding_of(out) == rounding_of(src)
    with pytest.warns(UserWarning, match="kv_cache_scheme=.*: keys and values are cached in FP8"):
        assert chosen(out) == "fp8"
