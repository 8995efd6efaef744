"""How often Hopper's tensor cores take an instruction of 64 lines and 16 inputs, by how many tokens it has.

    python -m benchmarks.kernels.wgmma_rate                    # two minutes; needs a Hopper GPU
    python -m benchmarks.kernels.wgmma_rate --tokens 8 80

Every multiprocessor does nothing else: one, two or four warpgroups multiply the same numbers again and again, whose left
operand is in registers, as that of converted weights is, or in shared memory. Printed are cycles of a multiprocessor for an
instruction, at 1.755 GHz; an instruction of n tokens multiplies and adds 1,024 n times, of which tensor cores do 2,048 in a
cycle at most."""

import argparse
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

INSTANCES, DEPTH, CLOCK = 132, 64, 1.755e9
FEW, MANY, REPEATS = 1_000, 11_000, 7  # times that a warpgroup multiplies: what a launch takes cancels
_SWIZZLED = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
_ACC: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def program(tokens: int, warpgroups: int, in_registers: bool, times: int):
    """A kernel without arguments that multiplies ``times`` over."""

    def kernel(y_ref, weight, x):
        def multiply(acc):
            left: Any = weight.at[lax.axis_index("warpgroup")]
            if in_registers:
                left = plgpu.layout_cast(jnp.full((64, DEPTH), 0.5, jnp.bfloat16), plgpu.Layout.WGMMA)

            @pl.loop(0, times)
            def _(_):
                plgpu.wgmma(acc, left, x.transpose((1, 0)))
                plgpu.wgmma_wait(0)

            return acc[...]

        y_ref.at[lax.axis_index("instance")][...] = pl.run_scoped(multiply, _ACC((64, tokens), jnp.float32))

    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((INSTANCES, 64, tokens), jnp.float32),
        grid=(INSTANCES,),
        grid_names=("instance",),
        num_threads=warpgroups,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        scratch_types=(
            plgpu.SMEM((warpgroups, 64, DEPTH), jnp.bfloat16, transforms=_SWIZZLED),
            plgpu.SMEM((tokens, DEPTH), jnp.bfloat16, transforms=_SWIZZLED),
        ),
    )


def cycles(tokens: int, warpgroups: int, in_registers: bool) -> float:
    """Cycles of a multiprocessor for an instruction."""

    def seconds(times: int) -> float:
        run = jax.jit(program(tokens, warpgroups, in_registers, times))
        run().block_until_ready()
        taken = []
        for _ in range(REPEATS):
            start = time.perf_counter()
            run().block_until_ready()
            taken.append(time.perf_counter() - start)
        return min(taken)

    instructions = (MANY - FEW) * DEPTH // 16 * warpgroups
    return (seconds(MANY) - seconds(FEW)) * CLOCK / instructions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8, 16, 40, 80])
    args = parser.parse_args()
    for in_registers in (True, False):
        for tokens in args.tokens:
            row = [cycles(tokens, warpgroups, in_registers) for warpgroups in (1, 2, 4)]
            place = "registers" if in_registers else "shared memory"
            print(f"left operand in {place}, {tokens} tokens:", *(f"{one:.1f}" for one in row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
