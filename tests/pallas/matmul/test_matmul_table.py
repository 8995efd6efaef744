"""The table of products: which row serves which shapes, dtypes and devices, and that no kernel is outside of it."""

import functools
import importlib
import inspect
import pkgutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of
from matmul_rows import abstract_weight

import jspec.pallas.matmul
from jspec.pallas.matmul import few_tokens, matmul, table
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.table import TABLE, Product, row_of


class Case(NamedTuple):
    """A product, by what rows are chosen by; x of ``int8`` is quantised, and its results are bfloat16."""

    tokens: int
    outputs: int
    inputs: int
    x: str = "bfloat16"
    weight: str = "bfloat16"
    dtype: str | None = None
    bias: bool = False

    @property
    def product(self) -> Product:
        array = jax.ShapeDtypeStruct
        x: Any = array((self.tokens, self.inputs), self.x)
        if self.x in ("int8", "float8_e4m3fn"):
            x = QuantizedActivations(x, array((self.tokens,), jnp.float32), jnp.dtype("bfloat16"))
        weight = abstract_weight(self.weight, (self.outputs, self.inputs))
        bias = array((self.outputs,), x.dtype) if self.bias else None
        return Product(x, weight, bias, jnp.dtype(self.dtype or x.dtype))


# By row, a product that it serves, and what is just beyond one of its limits, with the row that serves that.
EXAMPLES: dict[str, tuple[Case, list[tuple[dict[str, Any], str]]]] = {
    "W8A8": (
        Case(5, 4096, 4096, "int8", "int8"),
        [
            ({"tokens": 513}, "XLA"),
            ({"x": "bfloat16"}, "XLA"),
            ({"x": "float32"}, "XLA"),
            ({"x": "float8_e4m3fn", "weight": "fp8"}, "XLA"),
        ],
    ),
    "few tokens, four bits": (
        Case(5, 4096, 4096, weight="int4"),
        [
            ({"outputs": 4095}, "four bits"),
            ({"weight": "mxfp4"}, "four bits"),
            ({"inputs": 4160}, "four bits"),  # the last block is not whole
            ({"x": "float32"}, "XLA"),
        ],
    ),
    "four bits": (
        Case(5, 256, 512, weight="int4"),
        [({"x": "float32"}, "XLA"), ({"weight": "int8_128_float16_zeros"}, "groups, eight bits")],
    ),
    "few tokens, eight bits": (
        Case(16, 4096, 4096, weight="int8"),
        [
            ({"tokens": 8}, "XLA"),
            ({"tokens": 20}, "XLA"),  # no whole eights of tokens
            ({"tokens": 328}, "XLA"),
            ({"outputs": 2047}, "XLA"),
            ({"outputs": 3072}, "XLA"),  # too few tiles
            ({"outputs": 8200}, "int8"),
            ({"x": "float32"}, "XLA"),
            ({"weight": "fp8_block"}, "few tokens, FP8 blocks"),
        ],
    ),
    "few tokens, FP8 blocks": (
        Case(5, 4096, 4096, weight="fp8_block"),
        [
            ({"outputs": 2047}, "groups, eight bits"),
            ({"inputs": 4160}, "groups, eight bits"),  # the last block is not whole
            ({"x": "float32"}, "XLA"),
        ],
    ),
    "groups, eight bits": (
        Case(5, 256, 512, weight="fp8_block"),
        [({"x": "float32"}, "XLA"), ({"weight": "fp8"}, "XLA")],
    ),
    "int8": (
        Case(16, 8200, 4096, weight="int8"),  # no whole tiles of 64 outputs
        [
            ({"tokens": 1}, "one token, eight bits"),
            ({"tokens": 65}, "XLA"),
            ({"outputs": 8191}, "XLA"),
            ({"outputs": 8192}, "few tokens, eight bits"),
            ({"x": "float32"}, "XLA"),
            ({"weight": "fp8"}, "XLA"),
        ],
    ),
    "one token, eight bits": (
        Case(1, 64, 128, "float32", "fp8"),
        [({"tokens": 2}, "XLA"), ({"weight": "float32"}, "XLA"), ({"weight": "int4"}, "XLA")],
    ),
    "one token, reduction": (
        Case(1, 16_384, 4096),
        [
            ({"tokens": 2}, "XLA"),
            ({"outputs": 1000, "inputs": 10_000}, "XLA"),  # ten million numbers
            ({"inputs": 16_385}, "XLA"),
            ({"dtype": "float32"}, "XLA"),
            ({"weight": "int8"}, "one token, eight bits"),
        ],
    ),
    "bf16": (
        Case(5, 4096, 4096),
        [
            ({"tokens": 1}, "one token, reduction"),
            ({"tokens": 65}, "XLA"),
            ({"outputs": 4095}, "XLA"),
            ({"outputs": 16_384}, "XLA"),
            ({"x": "float32", "weight": "float32"}, "XLA"),
            ({"dtype": "float32"}, "XLA"),
            ({"bias": True}, "XLA"),
            ({"weight": "fp8"}, "XLA"),
        ],
    ),
    "XLA": (Case(1000, 64, 64, "float32", "float32"), []),
}
# The last numbers within limits that are ranges.
WITHIN = {
    "W8A8": [{"tokens": 1}, {"tokens": 512}],
    "few tokens, four bits": [{"tokens": 1}, {"tokens": 9}, {"tokens": 8192}, {"dtype": "float32"}, {"bias": True}],
    "four bits": [{"tokens": 1}, {"tokens": 8192}, {"bias": True}, {"dtype": "float32"}],
    "groups, eight bits": [{"tokens": 1}, {"tokens": 8192}, {"bias": True}, {"weight": "int8_128_float16_zeros"}],
    "few tokens, eight bits": [
        *({"tokens": 320}, {"weight": "fp8"}, {"dtype": "float32"}, {"bias": True}, {"outputs": 128256}),
    ],
    "few tokens, FP8 blocks": [{"tokens": 1}, {"tokens": 9}, {"tokens": 8192}, {"dtype": "float32"}, {"bias": True}],
    "int8": [{"tokens": 2}, {"tokens": 64}, {"bias": True}, {"dtype": "float32"}],
    "one token, eight bits": [{"x": "bfloat16"}, {"weight": "int8"}, {"dtype": "bfloat16"}],
    "one token, reduction": [{"outputs": 611, "inputs": 16_384}, {"bias": True}, {"x": "float32", "weight": "float32"}],
    "bf16": [{"tokens": 2}, {"tokens": 64}, {"outputs": 16_383}],
}
FEW_TOKENS = "few tokens, eight bits", "few tokens, FP8 blocks", "few tokens, four bits"
HOPPER_ONLY = "W8A8", *FEW_TOKENS, "bf16"
# By row, the one that has what it does not serve, and all on other GPUs.
FOLLOWS = {"few tokens, FP8 blocks": "groups, eight bits", "few tokens, four bits": "four bits"}
MOSAIC = jax.__version_info__ >= (0, 11)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Programs are lowered as for a Hopper GPU by jax 0.11 or later, but where a test says otherwise."""
    monkeypatch.setattr(table, "on_hopper", lambda: True)
    monkeypatch.setattr(few_tokens, "LOWERS", True)


def test_every_row_has_examples():
    assert list(EXAMPLES) == [row.name for row in TABLE]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_serves_products_up_to_its_limits(name):
    case, _ = EXAMPLES[name]
    within = [case, *(case._replace(**change) for change in WITHIN.get(name, []))]
    assert {row_of(each.product).name for each in within} == {name}


@pytest.mark.parametrize(
    ("name", "change", "other"),
    [(name, change, other) for name, (_, beyond) in EXAMPLES.items() for change, other in beyond],
    ids=str,
)
def test_a_product_beyond_a_limit_has_another_row(name, change, other):
    assert row_of(EXAMPLES[name][0]._replace(**change).product).name == other


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_for_hopper_serve_no_other_gpu(name, monkeypatch):
    monkeypatch.setattr(table, "on_hopper", lambda: False)
    assert row_of(EXAMPLES[name][0].product).name == (FOLLOWS.get(name, "XLA") if name in HOPPER_ONLY else name)


def test_no_two_rows_before_the_last_serve_one_product():
    """But where a row says which one follows it."""
    for name, (case, _) in EXAMPLES.items():
        serving = [row.name for row in TABLE[:-1] if row.refusal(case.product) is None]
        assert serving[1:] == ([FOLLOWS[name]] if name in FOLLOWS else [])


def test_every_kernel_of_the_folder_is_in_the_table(monkeypatch):
    monkeypatch.setattr(few_tokens, "LOWERS", MOSAIC)
    kernels = set()
    for module in pkgutil.iter_modules(jspec.pallas.matmul.__path__, "jspec.pallas.matmul."):
        functions = inspect.getmembers(importlib.import_module(module.name), callable)
        kernels |= {name.removesuffix("_kernel") for name, _ in functions if name.endswith("_matmul_kernel")}
    launched = set()
    for case, _ in EXAMPLES.values():
        x, weight, bias, dtype, _ = case.product
        text = for_cuda(functools.partial(matmul, dtype=dtype), (x, weight, bias))
        launched |= {*kernels_of(text), *mosaic_kernels_of(text)}
    assert kernels == {"bf16_matmul", "few_tokens_matmul", "w8a8_matmul", "weight_only_matmul"}
    assert launched == (kernels if MOSAIC else kernels - {"few_tokens_matmul"})


@pytest.mark.parametrize(("bias", "reduce_axis"), [(False, None), (True, None), (False, "shards"), (True, "shards")])
@pytest.mark.parametrize("name", HOPPER_ONLY)
def test_which_products_have_partial_sums(name, bias, reduce_axis):
    """Not one that a bias is added to, unless that waits for the sum over shards."""
    if name in FEW_TOKENS and not MOSAIC:
        pytest.skip("jax 0.10 does not lower the kernel")
    case, _ = EXAMPLES[name]
    x, weight, bias, *_ = case._replace(bias=bias).product
    how = {"reduce_axis": reduce_axis, "allow_partial_sums": True}
    mapped = jax.vmap(functools.partial(matmul, **how), axis_name="shards", in_axes=None, axis_size=2)
    y = jax.eval_shape(mapped, x, weight, bias)
    assert isinstance(y, PartialSums) == (bias is None or reduce_axis is not None)
    if reduce_axis is not None:
        assert (y.bias is None) == (bias is None)
        assert y.reduce_axis == reduce_axis


def test_a_bias_is_added_after_the_sum_over_shards():
    x, weight, bias = jnp.arange(8.0).reshape(2, 1, 4), jnp.ones((2, 3, 4)), jnp.array([1.0, 2.0, 3.0])
    add = functools.partial(matmul, reduce_axis="shards")
    y = jax.vmap(lambda x, weight: add(x, weight, bias), axis_name="shards")(x, weight)
    assert y.tolist() == [[[29.0, 30.0, 31.0]]] * 2

    def later(x, weight):
        return add(x, weight, bias, allow_partial_sums=True).total(x.dtype)

    assert jax.vmap(later, axis_name="shards")(x, weight).tolist() == y.tolist()
