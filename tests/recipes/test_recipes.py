"""The scripts that made the shipped checkpoints (corpus, tokenizer, training, export), each run on tiny data."""

import dataclasses
import json
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from tiny import LLAMA

import jspec
from jspec.models import abstract_params, build
from jspec.models.kv_cache import CausalView
from jspec.train import loop
from jspec.train.acceptance import TEMPERATURES, ServedAcceptance
from jspec.train.methods import Sizes
from recipes import corpus, heads, train
from recipes.configs import DRAFT, TARGET
from recipes.export import save_checkpoint
from recipes.objectives import agreement, distillation, language_modelling
from recipes.tokenizer import END_OF_TEXT, END_OF_TEXT_ID, save_tokenizer, train_tokenizer

OWN = {"architecture": "llama", "tie_embeddings": True, "bos_token_id": 0, "eos_token_ids": (0,)}
TINY = dataclasses.replace(LLAMA, vocab_size=320, num_layers=2, windows=(), head_dim=6, **OWN)
TINY_PLAN = loop.TrainingPlan(
    steps=20, peak_rate=1e-2, weight_decay=0.1, tokens_per_step=64, length=16, evaluate_every=5
)


@pytest.fixture(scope="module")
def library() -> list[corpus.Source]:
    """A few files of the standard library."""
    root = Path(sysconfig.get_paths()["stdlib"])
    return [corpus.Source(name, (root / name).read_text("utf-8")) for name in ("abc.py", "bisect.py", "textwrap.py")]


@pytest.fixture(scope="module")
def tokenizer(library):
    return train_tokenizer((source.text for source in library), vocab_size=TINY.vocab_size)


@pytest.fixture(scope="module")
def tokens(tokenizer, library) -> np.ndarray:
    return corpus.tokenise(tokenizer, library)


def test_sources_are_sorted_and_generated_or_foreign_files_are_left_out(tmp_path):
    kept = ("b.py", "a/z.py", "a.py", "test/test_a.py")
    dropped = ("site-packages/x.py", "a/__pycache__/x.py", "encodings/cp437.py", "_sysconfigdata_linux.py")
    for name in (*kept, *dropped, "config-3.12-linux/python-config.py", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"# {name}\n")
    (tmp_path / "latin.py").write_bytes(b"# caf\xe9\n")
    (tmp_path / "empty.py").touch()
    assert corpus.read_sources(tmp_path) == [corpus.Source(name, f"# {name}\n") for name in sorted(kept)]


def test_the_path_alone_decides_what_is_held_out():
    held_out = [f"m{i}.py" for i in range(10_000) if corpus.is_held_out(f"m{i}.py")]
    assert 150 < len(held_out) < 250  # one in fifty
    assert held_out[:3] == ["m73.py", "m74.py", "m75.py"]


def test_the_digest_covers_every_byte_and_where_a_path_ends():
    sources = [corpus.Source("a.py", "x = 1\n"), corpus.Source("b.py", "y = 2\n")]
    changed = [sources[0], corpus.Source("b.py", "y = 3\n")]
    moved = [corpus.Source("a.pyx", " = 1\n"), sources[1]]
    assert len({corpus.digest(s) for s in (sources, changed, moved, sources[:1])}) == 4
    assert corpus.digest(sources) == corpus.digest(list(sources))


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "def f(x):\n\treturn x  \n\n\n",
        "a\r\n  b\r\n",
        "é 日本語 🙂\x00\x7f",
        "0x1F + 1_000",
        END_OF_TEXT + "\n",
    ],
)
def test_any_text_round_trips(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


def test_tokens_follow_the_shape_of_python(tokenizer):
    assert tokenizer.get_vocab_size() == TINY.vocab_size
    assert tokenizer.token_to_id(END_OF_TEXT) == END_OF_TEXT_ID == TINY.bos_token_id
    indent, *rest = tokenizer.encode("\n        return 123").ids
    assert tokenizer.decode([indent]) == "\n        "
    assert [tokenizer.decode([token]) for token in rest[-3:]] == ["1", "2", "3"]


def test_training_a_tokenizer_twice_gives_the_same(tokenizer, library):
    again = train_tokenizer((source.text for source in library), vocab_size=TINY.vocab_size)
    assert again.to_str() == tokenizer.to_str()


def test_transformers_reads_the_tokenizer(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    save_checkpoint(tmp_path, TINY, tiny_params())
    save_tokenizer(tokenizer, tmp_path, TINY.max_position)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    text = "class A:\n    def f(self):\n        return [1, 2]\n"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids  # nothing is put in front
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.eos_token_id, len(loaded)) == (END_OF_TEXT_ID, TINY.vocab_size)


def test_an_end_of_text_token_separates_files(tokenizer, tokens, library):
    assert tokens.dtype == np.uint16
    borders = np.flatnonzero(tokens == END_OF_TEXT_ID)
    assert (borders[0], borders[-1], len(borders)) == (0, len(tokens) - 1, len(library) + 1)
    for source, start, stop in zip(library, borders[:-1], borders[1:], strict=True):
        assert tokenizer.decode(tokens[start + 1 : stop].tolist()) == source.text


def test_windows_are_consecutive_tokens_and_reach_both_ends_of_the_corpus():
    text = jnp.arange(40, dtype=jnp.uint16)
    windows = loop.draw_windows(text, jax.random.key(0), (512, 8))
    assert windows.shape == (512, 9)
    np.testing.assert_array_equal(windows, windows[:, :1] + np.arange(9)[None])
    assert (windows.min(), windows.max()) == (0, 39)
    np.testing.assert_array_equal(windows, loop.draw_windows(text, jax.random.key(0), (512, 8)))


def test_a_step_has_room_for_a_window():
    with pytest.raises(ValueError, match="tokens_per_step=1024: expected a window, 2048, or more"):
        loop.TrainingPlan(steps=1, peak_rate=1e-3, weight_decay=0.1, tokens_per_step=1024, length=2048)


def test_the_held_out_loss_of_uniform_logits_is_the_log_of_the_vocabulary_size(tokens):
    params = jax.tree.map(jnp.zeros_like, tiny_params())
    evaluate = loop.make_evaluator(language_modelling(TINY), tokens, (4, 16))
    assert evaluate(params, None) == pytest.approx(np.log(TINY.vocab_size), rel=1e-6)
    with pytest.raises(ValueError, match="10 held-out tokens do not fill a batch of 4 windows of 16 tokens"):
        loop.make_evaluator(language_modelling(TINY), tokens[:10], (4, 16))


def test_fit_learns_and_returns_the_weights_with_the_lowest_held_out_loss(tokens):
    loss, evaluations = language_modelling(TINY), []
    evaluate = loop.make_evaluator(loss, tokens, (4, 16))
    start = train.initial_params(TINY, jax.random.key(0))
    before = evaluate(start, None)
    best = loop.fit(
        TINY_PLAN,
        loss,
        evaluate,
        start,
        None,
        jnp.asarray(tokens),
        jax.random.key(1),
        lambda progress, params: evaluations.append(progress),
    )
    assert [progress.step for progress in evaluations] == [5, 10, 15, 20]
    assert evaluate(best, None) == min(progress.held_out_loss for progress in evaluations) < before - 0.5


def test_fit_raises_when_the_loss_is_not_finite(tokens):
    plan = dataclasses.replace(TINY_PLAN, steps=1)
    start = jax.tree.map(lambda w: w * jnp.nan, tiny_params())
    with pytest.raises(FloatingPointError, match="held-out loss nan at step 1: lower the learning rate"):
        loop.fit(
            plan,
            language_modelling(TINY),
            lambda *_: jnp.nan,
            start,
            None,
            jnp.asarray(tokens),
            jax.random.key(1),
            print,
        )


def test_a_draft_that_is_its_target_agrees_everywhere():
    params, other = tiny_params(0), tiny_params(1)
    windows = jax.random.randint(jax.random.key(2), (2, 17), 0, TINY.vocab_size)
    distil, measure = distillation(TINY, TINY), agreement(TINY, TINY)
    key = jax.random.key(3)
    assert distil(params, params, windows, key) == pytest.approx(0, abs=1e-6)
    assert measure(params, params, windows, key) == pytest.approx((1, 1), abs=1e-5)
    assert distil(params, other, windows, key) > 0.01
    assert all(value < 0.99 for value in measure(params, other, windows, key))


def test_distillation_is_the_kl_divergence_of_the_draft_from_the_target():
    target, draft = tiny_params(0), tiny_params(1)
    windows = jax.random.randint(jax.random.key(2), (2, 9), 0, TINY.vocab_size)
    distil, key = distillation(TINY, TINY), jax.random.key(3)
    divergences = distil(draft, target, windows, key), distil(target, draft, windows, key)
    p, q = (np.asarray(reference_logits(w, windows[:, :-1]), np.float64) for w in (target, draft))
    p, q = (x - np.log(np.exp(x).sum(-1, keepdims=True)) for x in (p, q))
    assert divergences == pytest.approx(((np.exp(p) * (p - q)).sum(-1).mean(), (np.exp(q) * (q - p)).sum(-1).mean()))


def test_checkpoint_gives_the_logits_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    params = {name: w.astype(jnp.bfloat16).astype(jnp.float32) for name, w in tiny_params().items()}
    save_checkpoint(tmp_path, TINY, params)
    assert {w.dtype.name for w in load_file(tmp_path / "model.safetensors").values()} == {"bfloat16"}
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, TINY.vocab_size, (2, 40))
    with torch.no_grad():
        expected = reference(torch.from_numpy(tokens)).logits.numpy()
    model = build(TINY, params)
    positions = jnp.broadcast_to(jnp.arange(40)[None], tokens.shape)
    hidden, _ = model(jnp.asarray(tokens), positions, (None,) * TINY.num_layers, CausalView(positions))
    np.testing.assert_allclose(model.logits(hidden), expected, rtol=0, atol=2e-5 * np.abs(expected).max())


def test_the_shipped_models_keep_to_their_sizes():
    assert DRAFT.vocab_size == TARGET.vocab_size <= 2048
    assert 8e6 < TARGET.num_parameters < 12e6
    assert 0.8e6 < DRAFT.num_parameters < 1.3e6
    assert 2 * (TARGET.num_parameters + DRAFT.num_parameters) < 30e6


def test_the_script_trains_and_writes_both_checkpoints(tmp_path, monkeypatch, tokenizer, tokens, capsys):
    data, out = tmp_path / "data", tmp_path / "out"
    data.mkdir()
    save_tokenizer(tokenizer, data, TINY.max_position)
    np.savez_compressed(data / "tokens.npz", train=tokens, held_out=tokens)
    (data / "corpus.json").write_text("{}")
    target = dataclasses.replace(TINY, num_layers=1, windows=())
    draft = dataclasses.replace(target, hidden_size=8, num_kv_heads=1)
    monkeypatch.setattr(train, "TARGET", target)
    monkeypatch.setattr(train, "DRAFT", draft)
    options = "--target-steps 8 --draft-steps 8 --tokens-per-step 64 --length 16"
    monkeypatch.setattr(sys, "argv", ["train", "--data", str(data), "--out", str(out), *options.split()])
    train.main()
    figures = json.loads((out / "figures.json").read_text())
    assert figures == json.loads(capsys.readouterr().out.split("\n", 2)[2])
    assert 0 < figures["draft"]["agreement"]["acceptance"] <= 1
    assert (out / "losses.csv").read_text().count("\n") == 3
    for folder, config in (("target", target), ("draft", draft)):
        weights = load_file(out / folder / "model.safetensors")
        assert sum(w.size for w in weights.values()) == config.num_parameters
        assert json.loads((out / folder / "config.json").read_text())["hidden_size"] == config.hidden_size
        assert (out / folder / "tokenizer.json").read_bytes() == (data / "tokenizer.json").read_bytes()


def test_the_script_trains_heads_and_does_not_train_a_finished_one_again(
    tmp_path, monkeypatch, tokenizer, tokens, capsys
):
    target, data, out = tmp_path / "target", tmp_path / "data", tmp_path / "out"
    save_checkpoint(target, TINY, tiny_params())
    save_tokenizer(tokenizer, target, TINY.max_position)
    data.mkdir()
    np.savez_compressed(data / "tokens.npz", train=tokens, held_out=tokens)
    plan = loop.TrainingPlan(4, 1e-2, 0.1, tokens_per_step=64, length=16, evaluate_every=2)
    served = dict.fromkeys(TEMPERATURES, jspec.Stats.of(1, [1], [1]))
    monkeypatch.setattr(ServedAcceptance, "__call__", lambda *_: served)
    monkeypatch.setattr(heads, "RECIPES", {"mlp": heads.Recipe(plan, Sizes(inner_size=8, tie=True))})
    options = ["heads", "--data", str(data), "--out", str(out), "--target", str(target)]

    monkeypatch.setattr(sys, "argv", [*options, "--bench"])
    assert heads.main() == 0
    assert "projected" in capsys.readouterr().out
    assert not out.exists()

    monkeypatch.setattr(sys, "argv", options)
    assert heads.main() == 0
    size = sum(w.size for w in load_file(out / "mlp" / "model.safetensors").values())
    assert f"mlp {size:17,d} parameters" in capsys.readouterr().out
    log = (out / "runs" / "mlp" / "losses.csv").read_text()
    assert log.count("\n") == 4
    assert heads.main() == 0  # finished already: nothing is trained again
    assert (out / "runs" / "mlp" / "losses.csv").read_text() == log


def test_the_shipped_heads_keep_to_their_sizes():
    sizes = {name: heads.make_objective(name, TARGET, recipe.sizes) for name, recipe in heads.RECIPES.items()}
    assert sizes.keys() == {"eagle", "eagle3", "parallel", "mlp", "dspark"}
    assert 2 * sum(objective.config.num_parameters for objective in sizes.values()) <= heads.MAX_BYTES
    mlp, dspark = sizes["mlp"].config, sizes["dspark"].config
    assert mlp.tied
    assert mlp.inner_size <= 192
    assert dspark.block_size == 7
    assert not dspark.own_head
    assert sizes["parallel"].depths >= 8


def tiny_params(seed: int = 0) -> dict[str, jax.Array]:
    """Random fp32 weights, large enough that attention and next-token distributions are far from uniform."""
    keys = jax.random.split(jax.random.key(seed), 64)
    shapes = abstract_params(TINY)
    return {
        name: 0.3 * jax.random.normal(key, leaf.shape) + name.endswith("norm.weight")
        for key, (name, leaf) in zip(keys, shapes.items(), strict=False)
    }


def reference_logits(params, tokens) -> jax.Array:
    """Logits as ``recipes.objectives`` computes them: a pass in bf16, and an output head that sums in fp32."""
    model = build(TINY, params, "bfloat16")
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1])[None], tokens.shape)
    hidden, _ = model(tokens, positions, (None,) * TINY.num_layers, CausalView(positions))
    return jnp.einsum("btd,vd->btv", hidden, model.embedding[...], preferred_element_type=jnp.float32)
