"""The table of products: which row serves which shapes, dtypes and devices, and that no kernel is outside of it."""

import functools
import importlib
import inspect
import itertools
import pkgutil
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from cuda_lowering import for_cuda, kernels_of, mosaic_kernels_of
from matmul_rows import abstract_weight

import jspec.pallas.matmul
from jspec.pallas.dispatch import explain, row_of
from jspec.pallas.matmul import few_tokens, matmul, table
from jspec.pallas.matmul.partial_sums import PartialSums
from jspec.pallas.matmul.quantize_activations import QuantizedActivations
from jspec.pallas.matmul.table import TABLE, Product


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


# By row, a product that it serves. Limits are the table's own; where they belong, benchmarks/kernels says.
EXAMPLES = {
    "W8A8": Case(5, 4096, 4096, "int8", "int8"),
    "few tokens, codes": Case(5, 4096, 4096, weight="int4"),
    "few tokens, codes of small weights": Case(64, 1024, 4096, weight="int4"),
    "codes": Case(5, 256, 512, weight="int4"),
    "few tokens, eight bits": Case(16, 4096, 4096, weight="int8"),
    "few tokens, FP8 blocks": Case(5, 4096, 4096, weight="fp8_block"),
    "few tokens, small groups": Case(5, 4096, 4096, weight="int8_32_float16"),
    "few tokens, groups of small weights": Case(64, 1024, 4096, weight="fp8_block"),
    "groups, eight bits": Case(5, 256, 512, weight="fp8_block"),
    "int8": Case(16, 8200, 4096, weight="int8"),  # no whole tiles of 64 outputs
    "one token, eight bits": Case(1, 64, 128, "float32", "fp8"),
    "one token, reduction": Case(1, 16_384, 4096),
    "few tokens, bf16": Case(80, 4096, 4096),
    "bf16": Case(5, 4096, 4096),
    "XLA": Case(1000, 64, 64, "float32", "float32"),
}
FEW_TOKENS = tuple(name for name in EXAMPLES if name.startswith("few tokens"))
HOPPER_ONLY = [row.name for row in TABLE if row.hopper]
MOSAIC = jax.__version_info__ >= (0, 11)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """Programs are lowered as for a Hopper GPU by jax 0.11 or later, but where a test says otherwise."""
    monkeypatch.setattr(table, "on_hopper", lambda: True)
    monkeypatch.setattr(few_tokens, "LOWERS", True)


def test_every_row_has_an_example():
    assert list(EXAMPLES) == [row.name for row in TABLE]


def at_limits(name: str) -> list[Case]:
    """The example of a row with so many tokens and outputs as its limits allow, and as are just beyond them."""
    case, row = EXAMPLES[name], next(row for row in TABLE if row.name == name)

    def around(limits: range, step: int) -> list[int]:
        ends = [limits.start, limits.stop] if limits.stop < 2**30 else [limits.start]
        return [-(-end // step) + more for end in ends for more in (-1, 0)]

    tokens = [case._replace(tokens=max(number, 1)) for number in around(row.tokens, 1)]
    outputs = [case._replace(outputs=max(number, 1)) for number in around(row.numbers, case.inputs)]
    return [case, *tokens, *outputs]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_row_is_reached_and_products_at_its_limits_are_computed(name, monkeypatch):
    """By it or by another row, in the shape and the dtype that were asked for."""
    assert row_of(TABLE, EXAMPLES[name].product).name == name
    monkeypatch.setattr(few_tokens, "LOWERS", MOSAIC)
    for case in dict.fromkeys(at_limits(name)):
        x, weight, bias, dtype, *_ = case.product
        y = jax.eval_shape(functools.partial(matmul, dtype=dtype), x, weight, bias)
        assert (y.shape, y.dtype) == ((case.tokens, case.outputs), dtype), case


@pytest.mark.parametrize("x", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "weight",
    [
        "bfloat16",
        "float32",
        "int8",
        "fp8",
        "int4",
        "nvfp4",
        "mxfp4",
        "nf4_64",
        "fp8_block",
        "mxfp8",
        "int8_32_float16_zeros",
    ],
)
def test_the_last_row_serves_every_product(weight, x):
    """But weights that it would write dequantised, all of them, are no product of it while x is bfloat16."""
    for tokens, outputs, inputs in itertools.product((1, 8, 64, 513, 8192), (63, 4096, 128_256), (64, 4160, 16_385)):
        for dtype, bias in itertools.product(("bfloat16", "float32"), (False, True)):
            product = Case(tokens, outputs, inputs, x, weight, dtype, bias).product
            assert TABLE[-1].refusal(product) is None
            if x == "bfloat16" and weight not in ("bfloat16", "float32", "int8", "fp8"):
                assert row_of(TABLE, product) is not TABLE[-1]


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_for_hopper_serve_no_other_gpu(name, monkeypatch):
    monkeypatch.setattr(table, "on_hopper", lambda: False)
    row = row_of(TABLE, EXAMPLES[name].product)
    assert not row.hopper
    assert row.name == name or name in HOPPER_ONLY


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"tokens": 8}, "8 tokens are not 9 or more"),
        ({"tokens": 20}, "20 tokens are no multiple of 8"),
        ({"x": "float32"}, "x is float32, not bfloat16"),
        ({"weight": "int4"}, "the weight is int4, not int8 or fp8"),
        ({"outputs": 64}, "262144 numbers of the weight are not 8388608 or more"),
        ({"outputs": 3072}, "48 tiles are fewer than 64, for half of a GPU"),
        ({}, None),
    ],
    ids=str,
)
def test_a_row_says_why_it_refuses(change, why):
    product = EXAMPLES["few tokens, eight bits"]._replace(**change).product
    assert next(row for row in TABLE if row.name == "few tokens, eight bits").refusal(product) == why
    *refused, (last, none) = explain(TABLE, product).items()
    assert (last, none) == (row_of(TABLE, product).name, None)
    assert all(reason for _, reason in refused)


def test_every_kernel_of_the_folder_is_in_the_table(monkeypatch):
    monkeypatch.setattr(few_tokens, "LOWERS", MOSAIC)
    kernels = set()
    for module in pkgutil.iter_modules(jspec.pallas.matmul.__path__, "jspec.pallas.matmul."):
        functions = inspect.getmembers(importlib.import_module(module.name), callable)
        kernels |= {name.removesuffix("_kernel") for name, _ in functions if name.endswith("_matmul_kernel")}
    launched = set()
    for case in EXAMPLES.values():
        x, weight, bias, dtype, *_ = case.product
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
    x, weight, bias, *_ = EXAMPLES[name]._replace(bias=bias).product
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
