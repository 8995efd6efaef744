"""Programs lowered for an H200 on a machine without a GPU, and the kernels in them."""

import contextlib
import re

import jax
import jax.numpy as jnp
import pytest
from jaxlib.mlir import ir
from jaxlib.triton import dialect

from jspec.pallas.attention.spec import PagedQueries

INTERPRETS = jax.__version_info__ >= (0, 11)
interpreted = pytest.mark.skipif(not INTERPRETS, reason="jax 0.10 does not interpret Mosaic kernels of this kind")
MOSAIC = "custom_call @mosaic_gpu_v2"
# A maximum or minimum of floats that Pallas' Triton lowering makes drops a NaN. These kernels have some, and none that
# decides whether a NaN reaches the results. ``test_bad_numbers`` tries whether it does.
DROPPED = {
    **dict.fromkeys(("attend_split", "decode_split"), "a score's weight, exp2(score - peak), is NaN if the score is"),
    "merge_splits": "a part whose scores have a NaN has a total that is NaN, whatever its peak is",
    "weigh_groups": "exp2(logit - peak) is NaN if the logit is, and is added up",
    "sample": "the normaliser is a sum over what weigh_groups found; a token without a normaliser means nothing",
    "weigh_residual": "a logarithm of w p that is NaN is bounded only where q is taken from it, and is a factor later",
    "sample_residual": "the normaliser of p tells whether the token means anything",
    "choose": "logits that are NaN are counted apart",
    "route_small_batch": "logits that are NaN are counted apart",
}


def h200():
    """jax 0.11 wants to know the device that it lowers for; 0.10 does not ask."""
    if jax.__version_info__ < (0, 11):
        return contextlib.nullcontext()
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device))


def shapes_of_queries(B, T, M) -> PagedQueries:
    """The shapes of T query tokens in each of B rows with M pages."""
    shapes = ((B, M), jnp.int32), ((B, T), jnp.int32), ((B, T), jnp.bool_)
    return PagedQueries(*(jax.ShapeDtypeStruct(*shape) for shape in shapes))  # pyright: ignore


def for_cuda(function, args) -> str:
    """What ``function`` of arguments of these shapes is lowered to."""
    with h200():
        return jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


def kernels_of(text: str) -> list[str]:
    """The names of the kernels in a lowered program, all of which are jspec's. None drops a NaN that it should not."""
    names = re.findall(r'name = "jspec_(\w+)"', text)
    assert text.count("@__gpu$xla.gpu.triton") == len(names)
    dropping = set(dropping_nan(text)) - set(DROPPED)
    assert not dropping, f"kernels with a maximum of floats that drops NaN: {dropping}"
    return names


def mosaic_kernels_of(text: str) -> list[str]:
    """The names of the kernels in a lowered program that Pallas' Mosaic GPU lowering made."""
    calls = re.findall(rf"{MOSAIC}.*?jspec_(\w+?)_mosaic_gpu", text)
    assert len(calls) == text.count(MOSAIC)
    return calls


def dropping_nan(text: str) -> list[str]:
    """Those of the kernels in a lowered program that have a maximum or minimum of floats which drops NaN."""
    return [name for name, code in code_of(text) if re.search(r"arith\.(max|min)numf", code)]


def code_of(text: str) -> list[tuple[str, str]]:
    """(name, operations of Triton) of each kernel in a lowered program."""
    found = re.findall(r'ir = "((?:[^"\\]|\\.)*)", name = "jspec_(\w+)"', text)
    assert text.count("@__gpu$xla.gpu.triton") == len(found)
    return [(name, _readable(escaped)) for escaped, name in found]


def _readable(escaped: str) -> str:
    """A kernel as text, from its bytes as a lowered program quotes them: those that are no letters in hexadecimal."""

    def byte(quoted: re.Match) -> bytes:
        return b"\\" if quoted[1] == b"\\" else bytes.fromhex(quoted[1].decode())

    code = re.sub(rb"\\(\\|[0-9A-F]{2})", byte, escaped.encode())
    with ir.Context() as context:
        dialect.register_dialect(context)
        context.allow_unregistered_dialects = True  # of barriers
        return str(ir.Module.parse(code))
