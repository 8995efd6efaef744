"""``jspec.integrations.tunix`` in Tunix's own learner. Tunix needs Python 3.12 and its own transformers, so this runs where
it is installed: ``pip install google-tunix==0.1.7``."""

import json
import shutil
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jspec

pytest.importorskip("tunix")
from transformers import AutoTokenizer
from tunix.models.llama3 import model as llama3  # pyright: ignore[reportMissingImports]
from tunix.models.llama3.params import create_model_from_safe_tensors  # pyright: ignore[reportMissingImports]
from tunix.rl import common, rl_cluster  # pyright: ignore[reportMissingImports]
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner  # pyright: ignore[reportMissingImports]
from tunix.rl.rollout.base_rollout import RolloutConfig  # pyright: ignore[reportMissingImports]

from jspec.integrations.tunix import JspecRollout

MODELS = Path(jspec.__file__).parent / "demo_models"
PROMPTS = ["import os\n", "class Queue:\n"]
ROLLOUT = RolloutConfig(max_tokens_to_generate=12, temperature=0.9, max_prompt_length=16, return_logprobs=True)


def rotated_as_tunix_does(name: str, folder: Path) -> Path:
    """A demo model with the theta that Tunix's Llama has, whatever its config says."""
    shutil.copytree(MODELS / name, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_theta": 1e6}))
    return folder


def tunix_llama(folder: Path):
    keys = json.loads((folder / "config.json").read_text())
    config = llama3.ModelConfig(
        num_layers=keys["num_hidden_layers"],
        vocab_size=keys["vocab_size"],
        embed_dim=keys["hidden_size"],
        hidden_dim=keys["intermediate_size"],
        num_heads=keys["num_attention_heads"],
        head_dim=keys["head_dim"],
        num_kv_heads=keys["num_key_value_heads"],
        rope_theta=1_000_000,
        norm_eps=keys["rms_norm_eps"],
        weight_tying=keys["tie_word_embeddings"],
    )
    mesh = jax.make_mesh((1, 1), ("fsdp", "tp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    with mesh:
        return create_model_from_safe_tensors(str(folder), config, mesh, dtype=jnp.float32), mesh


@pytest.mark.filterwarnings("ignore")
def test_three_steps_of_grpo(tmp_path):
    """Three updates, no program compiled, and log-probabilities that are Tunix's own of the newest weights."""
    target, draft = (rotated_as_tunix_does(name, tmp_path / name) for name in ("target", "draft"))
    (model, mesh), (reference, _) = tunix_llama(target), tunix_llama(target)
    llm = jspec.load(target, draft, num_draft_tokens=3, max_batch=8, max_len=64, dtype="float32").warmup()
    made: list[JspecRollout] = []

    class Rollout(JspecRollout):
        def __init__(self, **of_tunix):
            super().__init__(**of_tunix, llm=llm)
            made.append(self)

    role = rl_cluster.Role
    cluster = rl_cluster.RLCluster(
        actor=model,
        reference=reference,
        tokenizer=AutoTokenizer.from_pretrained(target),
        cluster_config=rl_cluster.ClusterConfig(
            role_to_mesh={role.ACTOR: mesh, role.REFERENCE: mesh, role.ROLLOUT: mesh},
            rollout_engine=Rollout,
            offload_to_cpu=False,
            training_config=rl_cluster.RLTrainingConfig(
                actor_optimizer=optax.adam(1e-3), eval_every_n_steps=10, max_steps=3
            ),
            rollout_config=ROLLOUT,
        ),
    )
    rewards = lambda prompts, completions, **_: [float(text.count("\n")) for text in completions]  # noqa: E731
    learner = GRPOLearner(rl_cluster=cluster, reward_fns=rewards, algo_config=GRPOConfig(num_generations=4, beta=0.04))
    compiled = llm.engine.num_compilations
    learner.train([{"prompts": np.array(PROMPTS)}] * 3)
    assert llm.engine.loop.weights_version == 3
    assert llm.engine.num_compilations == compiled

    [rollout] = made
    out: Any = rollout.generate(PROMPTS, ROLLOUT)
    completions = np.full((2, ROLLOUT.max_tokens_to_generate), rollout.pad_id(), np.int32)
    for row, tokens in zip(completions, out.tokens, strict=True):
        row[: len(tokens)] = tokens
    given = jnp.asarray(out.left_padded_prompt_tokens), jnp.asarray(completions)
    read = completions != rollout.pad_id()

    def of_tunix(**how) -> np.ndarray:
        ids = rollout.pad_id(), rollout.eos_id()
        return np.asarray(common.compute_per_token_logps(*nnx.split(model), *given, *ids, **how))

    scored = np.asarray(rollout.get_per_token_logps(*given))
    np.testing.assert_allclose(scored[read], of_tunix()[read], atol=3e-5)
    sampled = np.zeros(completions.shape, np.float32)
    for row, own in zip(sampled, out.logprobs, strict=True):
        row[: len(own)] = own
    np.testing.assert_allclose(sampled[read], of_tunix(temperature=0.9)[read], atol=3e-5)
