#!/usr/bin/env bash
# jax 0.10.2 on a CPU: a compiled division by a number that a whole row shares is a product with its reciprocal.
#
# x / d is rounded once in IEEE arithmetic and in NumPy. Where d is a constant, or one number for each row, jax.jit computes x * (1 / d),
# which rounds twice. So weights that are rounded to int8 by the largest magnitude of their row (scale = max / 127, code = rint(x / scale))
# do not get the bits that the same lines give in NumPy: 18 of 256 scales here, and with NumPy's own scales 73 of 262,144 codes, those that
# are ties. optimization_barrier around the constant does not help. What does is a divisor that nobody can see to be shared: d + 0 * x.
# jax 0.11.2 and 0.12.0.1 have the same counts.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2 ml_dtypes
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

weights = np.random.default_rng(0).standard_normal((256, 1024)).astype(ml_dtypes.bfloat16).astype(np.float32)
peak = np.abs(weights).max(axis=1)
scale = peak / np.float32(127)
codes = np.rint(weights / scale[:, None])

divisors = {
    "a constant": lambda peak: jnp.float32(127),
    "the same behind optimization_barrier": lambda peak: jax.lax.optimization_barrier(jnp.float32(127)),
    "constant + 0 * x": lambda peak: 127 + 0 * peak,
}
differ = {}
for name, divisor in divisors.items():
    found = jax.jit(lambda peak, divisor=divisor: peak / divisor(peak))(peak)
    differ[name] = int((np.asarray(found) != scale).sum())
    print(f"scales divided by {name}: {differ[name]} of {len(scale)} are not NumPy's")
by_row = {
    "one number a row": lambda x, scale: jnp.rint(x / scale[:, None]),
    "that number + 0 * x": lambda x, scale: jnp.rint(x / (scale[:, None] + 0 * x)),
}
for name, function in by_row.items():
    differ[name] = int((np.asarray(jax.jit(function)(weights, scale)) != codes).sum())
    print(f"codes divided by {name}: {differ[name]} of {codes.size} are not NumPy's")
assert differ["a constant"] == differ["the same behind optimization_barrier"] > 0, "the behaviour has changed"
assert differ["one number a row"] > 0, "the behaviour has changed"
assert differ["constant + 0 * x"] == differ["that number + 0 * x"] == 0, "the behaviour has changed"
PY
