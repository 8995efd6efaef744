"""Attention whose output has a gate: a layer of Qwen3.5 with full attention, against golden arrays."""

from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.files.tensor import Derived
from jspec.checkpoints.tensors.names import tensor_table
from jspec.checkpoints.tensors.parts import rearrange
from jspec.config import ModelConfig, Rope
from jspec.models import build
from jspec.models.kv_cache import CausalView

GOLDEN = np.load(Path(__file__).parents[1] / "golden" / "attention_gate.npz")
AT = "model.layers.0."
CONFIG = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=5,
    hidden_size=24,
    intermediate_size=20,
    num_layers=1,
    num_heads=3,
    num_kv_heads=1,
    head_dim=16,
    max_position=16,
    rms_norm_eps=1e-6,
    rope=Rope(theta=1e4, fraction=0.25),
    qk_norm=True,
    norm="rms_offset",
    tie_embeddings=True,
    attention_gate=True,
)


def params() -> dict[str, np.ndarray]:
    """The params of ``CONFIG`` from tensors by their names in a checkpoint."""
    arrays = {AT + name.removeprefix("w."): GOLDEN[name] for name in GOLDEN.files if name.startswith("w.")}
    arrays |= {"model.embed_tokens.weight": np.zeros((5, 24)), "model.norm.weight": np.zeros(24)}
    tensors = {
        name: Derived(name, "golden", Path("golden"), array.shape, "float32", np.asarray(array, np.float32))
        for name, array in arrays.items()
    }
    tensors, filled = rearrange(CONFIG, dict(tensors)), {}
    for name, at in tensor_table(CONFIG).items():
        filled.setdefault(at.param, []).append((at.start, tensors[name].read()))
    return {
        param: np.concatenate([array for _, array in sorted(parts, key=lambda x: x[0])])
        for param, parts in filled.items()
    }


def output(config=CONFIG):
    [layer], x = build(config, params()).layers, jnp.asarray(GOLDEN["x"], jnp.float32)[None]
    positions = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return layer(x, layer.attention_norm(x), positions, None, CausalView(positions), None)[0][0]


def test_a_layer_equals_the_golden_one():
    np.testing.assert_allclose(output(), GOLDEN["y"], rtol=2e-5, atol=2e-5)


def test_gates_of_other_heads_are_noticed(monkeypatch):
    """As if all gates came behind all queries in the file, too."""
    from jspec.checkpoints.tensors import parts

    monkeypatch.setattr(parts, "_of_each_head", lambda heads, size, start, stop: np.arange(heads * start, heads * stop))
    assert np.abs(np.asarray(output()) - GOLDEN["y"]).max() > 0.05
