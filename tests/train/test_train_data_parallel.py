"""Training with a target in shards on 2 and 4 devices: the loss and its gradients are those of one device, faults are seen,
and no device has the logits of all windows."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines import in_shards
from flax import nnx
from train_toys import SIZES, TARGET

from jspec.config import Experts
from jspec.config.sharding import AXIS
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.models import Decoder
from jspec.models.flatten import flatten
from jspec.train import data_parallel
from jspec.train.acceptance import ServedAcceptance
from jspec.train.data_parallel import OwnWindows, replicate_beside, sharded_loss
from jspec.train.initial_weights import output_head_of
from jspec.train.methods import Sizes, initial_params, make_objective
from jspec.train.objectives import loss_of

pytestmark = pytest.mark.usefixtures("small_groups")
B, T = 4, 12
CHOICES = {  # of targets: how their embeddings and output heads differ
    "plain": {},
    "tied": {"tie_embeddings": True},
    "capped": {"logit_softcap": 0.5, "logit_divisor": 2.0},
    "projected": {"embedding_size": 6},
    "int8": {"quantization": "int8"},
    "experts": {"experts": Experts(4, 2, 8)},
}
BORROWED = Sizes(num_draft_tokens=2, borrow_head=True)
NIGHTLY = pytest.mark.nightly
CASES = [
    *(
        pytest.param(method, sizes, "plain", 2, marks=() if method in ("eagle3", "mlp") else NIGHTLY)
        for method, sizes in SIZES.items()
    ),
    *(
        pytest.param(method, sizes, "plain", 4, marks=() if method == "eagle3" else NIGHTLY)
        for method, sizes in SIZES.items()
    ),
    *(
        pytest.param(
            method, SIZES[method], target, 2, marks=() if (method, target) == ("eagle", "experts") else NIGHTLY
        )
        for method in ("eagle", "mtp", "dflash")
        for target in CHOICES
        if target != "plain"
    ),
    ("medusa", BORROWED, "tied", 2),
    pytest.param("medusa", BORROWED, "plain", 4, marks=NIGHTLY),
    pytest.param("eagle3", SIZES["eagle3"], "int8", 4, marks=NIGHTLY),
]


@functools.cache
def one_device(choice: str) -> Decoder:
    return Decoder(dataclasses.replace(TARGET, **CHOICES[choice]), rngs=nnx.Rngs(0))


def random_windows(vocab_size: int) -> jax.Array:
    return jax.random.randint(jax.random.key(7), (B, T + 1), 0, vocab_size)


def start_of(objective, target: Decoder) -> tuple[dict, dict]:
    """Initial weights with some noise, so that none has a gradient of zero, and constants."""
    params, constants = initial_params(objective, target, np.arange(400) ** 2 % 31, jax.random.key(0))
    keys = dict(zip(params, jax.random.split(jax.random.key(1), len(params)), strict=True))
    return {name: x + 0.1 * jax.random.normal(keys[name], x.shape) for name, x in params.items()}, constants


def loss_and_gradients(objective, target: Decoder, start: tuple[dict, dict]) -> tuple[jax.Array, dict]:
    """Of one step on the windows, on the device or the devices of the target."""
    loss = sharded_loss(objective, target, "float32") if target.shards else plain_loss(objective, target)
    params, constants, key = replicate_beside(target, (*start, jax.random.key(3)))
    frozen = flatten(target).leaves, constants
    return jax.jit(jax.value_and_grad(loss))(params, frozen, random_windows(target.config.vocab_size), key)


def plain_loss(objective, target: Decoder):
    return loss_of(objective, flatten(target).merge, "float32")


def error(found, wanted) -> float:
    """The largest difference of two arrays, relative to the largest number of the second."""
    found, wanted = np.asarray(found), np.asarray(wanted)
    return float(np.abs(found - wanted).max() / np.abs(wanted).max())


def errors(found, wanted) -> dict[str, float]:
    """Of a loss, and of the gradient of each weight by its name."""
    return {"loss": error(found[0], wanted[0])} | {name: error(found[1][name], wanted[1][name]) for name in wanted[1]}


@functools.cache
def on_one_device(method: str, sizes: Sizes, choice: str) -> tuple:
    """A target, an objective, where training begins, and the loss and gradients there: what all counts of devices equal."""
    whole = one_device(choice)
    objective = make_objective(method, whole.config, sizes)
    start = start_of(objective, whole)
    return whole, objective, start, loss_and_gradients(objective, whole, start)


@pytest.mark.parametrize(("method", "sizes", "choice", "count"), CASES)
def test_loss_and_gradients_are_those_of_one_device(method, sizes, choice, count):
    whole, objective, start, wanted = on_one_device(method, sizes, choice)
    found = loss_and_gradients(objective, in_shards(whole, count), start)
    assert all(np.abs(np.asarray(gradient)).max() > 0 for gradient in wanted[1].values())
    assert {name: value for name, value in errors(found, wanted).items() if value > 1e-5} == {}


def test_expert_parallel_loss_is_that_of_one_device():
    whole, objective, start, wanted = on_one_device("eagle3", SIZES["eagle3"], "experts")
    found = loss_and_gradients(objective, in_shards(whole, 2, by_expert=True), start)
    assert max(errors(found, wanted).values()) < 1e-5


def logits_of_others(patch):
    """The target's logits are those of the other device's windows."""
    logits = OwnWindows.logits
    patch.setattr(OwnWindows, "logits", lambda *args: jax.lax.ppermute(logits(*args), AXIS, ((0, 1), (1, 0))))


def part_of_the_embeddings(patch):
    """Embeddings are looked up as if every device had the same windows."""
    patch.setattr(OwnWindows, "embed", lambda self, tokens: self.target.embed(tokens))


def same_noise(patch):
    """Windows are numbered on each device anew."""
    patch.setattr(data_parallel, "loss_of", lambda *args: loss_of(*args[:3]))


def gradients_of_one(patch):
    """The gradients of the first device's windows alone."""
    shard_map = ProgramSharding.shard_map

    def alone(self, function, in_specs, out_specs):
        def of_first(params, *others):
            first = jax.lax.axis_index(AXIS) == 0
            here = jax.tree.map(lambda x: jnp.where(first, x, jax.lax.stop_gradient(x)), params)
            return function(here, *others)

        return shard_map(self, of_first, in_specs, out_specs)

    patch.setattr(ProgramSharding, "shard_map", alone)


@pytest.mark.parametrize(
    ("fault", "method", "seen_in_loss"),
    [
        (logits_of_others, "mlp", True),
        (part_of_the_embeddings, "eagle3", True),
        (same_noise, "eagle", True),
        (same_noise, "dspark", True),
        (gradients_of_one, "medusa", False),
    ],
)
def test_injected_faults_are_detected(fault, method, seen_in_loss, monkeypatch):
    whole, objective, start, wanted = on_one_device(method, SIZES[method], "plain")
    fault(monkeypatch)
    found = errors(loss_and_gradients(objective, in_shards(whole, 2), start), wanted)
    assert (found.pop("loss") > 1e-4) == seen_in_loss
    assert max(found.values()) > 1e-3


@pytest.mark.parametrize("count", [2, 4])
def test_an_output_head_starts_as_the_targets(count):
    for choice in ("plain", "tied", "capped", "int8"):
        whole = one_device(choice)
        np.testing.assert_array_equal(output_head_of(in_shards(whole, count)), output_head_of(whole))


@pytest.mark.parametrize(
    ("method", "sizes"),
    [
        *(
            pytest.param(*item, marks=() if item[0] in ("eagle3", "dflash", "mlp") else NIGHTLY)
            for item in SIZES.items()
        ),
        ("medusa", BORROWED),
    ],
)
def test_no_device_has_the_logits_of_all_windows(method, sizes):
    """Of the arrays of the compiled step, the largest is that of the logits of a device's own windows. The loss of a DFlash
    head looks at the text alone, so that the target computes no logits."""
    vocabulary = 1600  # so that logits are larger than weights
    config = dataclasses.replace(TARGET, vocab_size=vocabulary)
    sizes = dataclasses.replace(sizes, draft_vocab_size=vocabulary if sizes.draft_vocab_size else None)
    model = in_shards(Decoder(config, rngs=nnx.Rngs(0)), 2)
    objective = make_objective(method, config, sizes)
    params, constants, key = replicate_beside(model, (*start_of(objective, model), jax.random.key(3)))
    step = jax.jit(jax.value_and_grad(sharded_loss(objective, model, "float32")))
    program = (
        step.lower(params, (flatten(model).leaves, constants), random_windows(vocabulary), key).compile().as_text()
    )
    shapes = re.findall(r"\b(?:f32|bf16)\[([\d,]+)\]", program)
    largest = max(np.prod([int(size) for size in shape.split(",")]) for shape in shapes)
    logits = B * T * vocabulary // 2
    assert largest == logits if method != "dflash" else largest < logits


def test_acceptance_is_that_of_one_device():
    """Wherever the weights of the head are."""
    whole = one_device("plain")
    objective = make_objective("eagle3", whole.config, SIZES["eagle3"])
    params, constants = start_of(objective, whole)
    held_out = np.arange(200, dtype=np.int32) ** 2 % whole.config.vocab_size
    one, two = (
        ServedAcceptance(target, objective.config, held_out, 2, objective.depths, "float32")(params | constants)
        for target in (whole, in_shards(whole, 2))
    )
    assert one == two
