#!/usr/bin/env bash
# jax 0.10.2 on a CPU: neither optimization_barrier nor reduce_precision keeps a product apart from the sum that reads it.
#
# a * b + x * y rounds once where XLA's LLVM makes one instruction (FMA) of a product and the sum. A program that needs each step rounded,
# so that its numbers are those of another program, finds no help there: with lax.optimization_barrier around both products, and with
# lax.reduce_precision(product, 8, 23), which is float32's own precision, the compiled function has the same bits as without, which are not
# those of the steps one after the other. With jax 0.11.2 the barrier does keep them apart. What helps in both is a select that the compiler
# cannot decide: where(product == product, product, nan).
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np

rng = np.random.default_rng(0)
a, b, x, y = (rng.normal(size=320).astype(np.float32) for _ in range(4))
steps = a * b + x * y  # NumPy rounds each product, and then the sum
keep = {
    "nothing": lambda product: product,
    "optimization_barrier": jax.lax.optimization_barrier,
    "reduce_precision": lambda product: jax.lax.reduce_precision(product, 8, 23),
    "where": lambda product: jnp.where(product == product, product, jnp.nan),
}
differ = {}
for name, apart in keep.items():
    found = jax.jit(lambda a, b, x, y, apart=apart: apart(a * b) + apart(x * y))(a, b, x, y)
    differ[name] = int((np.asarray(found) != steps).sum())
    print(f"{name}: {differ[name]} of 320 numbers are not those of the steps")
assert differ["nothing"] == differ["optimization_barrier"] == differ["reduce_precision"] > 0, "the behaviour has changed"
assert differ["where"] == 0, "the behaviour has changed"
PY
