"""The decode step of a target in two shards, as XLA compiles it for two H200s: each GPU launches what one would for its
part, moves no cache and no weight, and adds up twice a layer: in launches of the norms, or by XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
from deviceless import compiled_on, gpus, why_not
from jax.sharding import NamedSharding, PartitionSpec

import benchmarks.kernels.sums
from benchmarks.rounds.hlo import launched, moves
from benchmarks.rounds.programs import Decoding, decoding_program
from benchmarks.shapes import GPT_OSS_20B, LLAMA_8B
from jspec.config import Shards
from jspec.config.sharding import AXIS
from jspec.engine.runner.shard_map import ProgramSharding
from jspec.models.sharding import abstract_shards
from jspec.pallas.collectives.peers import room_for
from jspec.pallas.collectives.workspace import MOST_BLOCKS, Exchange

pytestmark = pytest.mark.skipif(why_not() is not None, reason=why_not() or "")

LARGE = 1 << 20  # bytes
SHARDS = Shards(2)
MODELS = {"llama": LLAMA_8B, "gpt-oss": GPT_OSS_20B}
# Launches of one more layer, sums over the GPUs included: those of one GPU (test_decode_step.py, test_mixture_step.py), and
# with sharding by expert the selection of a GPU's own experts. Sums of XLA are launches of their own.
LAYER_BUDGET = {("llama", 1): 9, ("llama", 16): 11, ("gpt-oss", 1): 15, ("gpt-oss", 16): 20}
MORE_FOR_XLA = 3


@functools.cache
def text(model: str, batch: int, layers: int, packets: bool = True) -> str:
    """The compiled rounds of a batch."""
    config = dataclasses.replace(MODELS[model], num_layers=layers, windows=MODELS[model].windows[:layers])
    mesh = gpus(SHARDS.count, AXIS)
    target = abstract_shards(config, SHARDS, mesh)
    spread = ProgramSharding.of(target, None)
    assert spread is not None
    what = Decoding(None, 0, batch, start=512, new=256)
    program = decoding_program(target, None, None, what.engine_config("bfloat16"), what)

    def placed(spec, part):
        place = NamedSharding(mesh, spec)
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place), part)

    state = jax.eval_shape(program.fresh)
    if packets:
        shapes = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((SHARDS.count, 2), (MOST_BLOCKS,)))
        state = dataclasses.replace(
            state, exchange=Exchange(*shapes, room_for(config.hidden_size, jnp.bfloat16, SHARDS.count))
        )
    state = jax.tree.map(placed, spread.state, state, is_leaf=lambda x: x is None)
    how = {"donate_argnums": 1, "compiler_options": program.options}
    return compiled_on(mesh, program.function, program.leaves, state, **how).as_text()


def sums(hlo: str) -> list[int]:
    """How many sums a round has, by packets and by XLA."""
    ops = launched(hlo, loop=True)
    return [sum("jspec_peer_sum" in op.line for op in ops), sum(op.kind.startswith("all-reduce") for op in ops)]


@pytest.mark.parametrize("batch", [1, 16])
@pytest.mark.parametrize("model", MODELS)
class TestStep:
    def test_moves_no_cache_and_no_weight(self, model, batch):
        """Logits, which are gathered, are put in order: they are neither."""
        assert [op.line for op in moves(text(model, batch, 2), LARGE) if "fusion(%all_gather" not in op.line] == []

    def test_adds_up_twice_a_layer_and_once_for_the_embeddings(self, model, batch):
        assert [sums(text(model, batch, layers)) for layers in (2, 3)] == [[5, 0], [7, 0]]
        assert sums(text(model, batch, 2, packets=False)) == [0, 5]

    @pytest.mark.parametrize("packets", [True, False])
    def test_a_layer_launches_no_more_than_it_did(self, model, batch, packets):
        fewer, more = (len(launched(text(model, batch, layers, packets), loop=True)) for layers in (2, 3))
        assert 0 < more - fewer <= LAYER_BUDGET[model, batch] + (0 if packets else MORE_FOR_XLA)


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("sum", ["all-reduce", "custom-call"]),
        ("scattered", ["all-gather", "custom-call", "reduce-scatter"]),
        ("peer", ["custom-call"]),
        ("packets", ["custom-call"]),
        ("two trips", ["custom-call"]),
    ],
)
def test_ways_to_add_up_compile(way, kinds):
    """Those that ``python -m benchmarks.kernels.sums`` times, for as many tokens as the GPUs divide."""
    mesh = gpus(SHARDS.count, AXIS)
    shapes = [((16, 4096), ()), ((2, 16, 4096), (AXIS,)), ((4096,), ())]
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16, sharding=NamedSharding(mesh, PartitionSpec(*at))) for s, at in shapes]
    same = NamedSharding(mesh, PartitionSpec())
    shapes = (jax.ShapeDtypeStruct(s, jnp.int32, sharding=same) for s in ((SHARDS.count, 2), (MOST_BLOCKS,)))
    packets = way in benchmarks.kernels.sums.BY_PACKETS
    exchange = Exchange(*shapes, room_for(4096, jnp.bfloat16, SHARDS.count)) if packets else None
    hlo = compiled_on(mesh, benchmarks.kernels.sums.chained(way, 16, mesh, sums=2), *args, exchange).as_text()
    op_kinds = {op.kind.removesuffix("-start") for op in launched(hlo)}
    assert sorted(op_kinds - {"fusion", "copy"}) == kinds


@pytest.mark.parametrize("batch", [1, 16, 64])
def test_a_round_is_one_graph(batch):
    """XLA's exchanges end a CUDA graph: a round with none of them is launched at once, as that of one GPU is."""
    kinds = {op.kind.removesuffix("-start") for op in launched(text("llama", batch, 2), loop=True)}
    assert kinds <= {"fusion", "copy", "custom-call", "while"}


def test_many_rows_are_verified_in_batch_shards():
    """The logits of a row go to one GPU, and are put in order there without a copy of their own."""
    hlo = text("llama", 64, 2, packets=False)
    exchanged = [op.line for op in launched(hlo, loop=True) if op.kind.startswith(("all-gather", "all-to-all"))]
    assert len(exchanged) == 2
    assert "bf16[64,1,64512]" in exchanged[0]
    assert "s32[64,3]" in exchanged[1]  # verification results
    assert moves(hlo, LARGE) == []
