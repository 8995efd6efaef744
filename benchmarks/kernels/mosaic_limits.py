"""What Pallas' Mosaic GPU lowering has no rule for, of what the kernels on Triton's lowering do:
``python -m benchmarks.kernels.mosaic_limits``. It lowers small kernels for an NVIDIA GPU and needs none."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

N = 128  # numbers of an array: a warpgroup has as many threads


def _square(x_ref, _, y_ref):
    y_ref[...] = x_ref[...] * x_ref[...]


def _noise(x_ref, _, y_ref):
    bits = jax.lax.bitcast_convert_type(x_ref[...], jnp.uint32)
    y_ref[...] = ((bits * jnp.uint32(3)) ^ (bits >> jnp.uint32(7))).astype(jnp.float32)


def _total(x_ref, _, y_ref):
    y_ref[...] = jnp.full(N, jnp.sum(x_ref[...]))


def _gather(x_ref, at_ref, y_ref):
    y_ref[...] = x_ref[at_ref[...]]


def _scatter(x_ref, at_ref, y_ref):
    y_ref[at_ref[...]] = x_ref[...]


def _cumsum(x_ref, _, y_ref):
    y_ref[...] = jnp.cumsum(x_ref[...])


def _argmax(x_ref, _, y_ref):
    y_ref[...] = jnp.full(N, jnp.argmax(x_ref[...])).astype(jnp.float32)


def _sort(x_ref, _, y_ref):
    y_ref[...] = jnp.sort(x_ref[...])


CASES: dict[str, tuple[Callable, int]] = {  # kernel, numbers of an array
    "numbers one by one": (_square, N),
    "noise of integers": (_noise, N),
    "a sum of all": (_total, N),
    "reads by a vector of indices": (_gather, N),
    "writes by a vector of indices": (_scatter, N),
    "cumulative sums": (_cumsum, N),
    "the place of a maximum": (_argmax, N),
    "sorting": (_sort, N),
    f"arrays of fewer than {N} numbers": (_square, N // 4),
}


def refusal(kernel: Callable, size: int) -> str | None:
    """Why a kernel on arrays ``[size]`` does not lower, its exception's first line; None if it does."""
    numbers, at = (jax.ShapeDtypeStruct((size,), dtype) for dtype in (jnp.float32, jnp.int32))
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    call = plgpu.kernel(kernel, out_type=numbers, grid=(1,), grid_names=("instance",), compiler_params=params)
    try:
        jax.jit(call).trace(numbers, at).lower(lowering_platforms=("cuda",))
    except (NotImplementedError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def main():
    print(f"jax {jax.__version__}")
    for name, case in CASES.items():
        why = refusal(*case)
        print(f"{name:40}", "lowers" if why is None else f"no: {why[:80]}")


if __name__ == "__main__":
    main()
