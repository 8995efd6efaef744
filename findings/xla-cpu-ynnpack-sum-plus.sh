#!/usr/bin/env bash
# jax 0.10.2 on a CPU: a compiled sum of products to which something is added has wrong numbers from result 32,768 on.
#
# y = a + sum(w * b) over the last axis, where w [3, 4, 3] is the same for every row of b. XLA makes one fusion of product, sum and addition
# and leaves it to YNNPACK ("__ynn_fusion" in the compiled text). The first 2,730 rows of 12 results each are right, all behind them are off
# by as much as the numbers are large, on one thread as on several, and nothing warns. Without jit, the sum alone, or fewer rows are right.
# The same lines give the right numbers with jax 0.11.2.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2 jaxlib==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import jax.numpy as jnp
import numpy as np


def total(a, w, b):
    return jnp.sum(w[None] * b, axis=-1)


def added(a, w, b):
    return a + total(a, w, b)


def errors(fn, rows: int, compiled: bool) -> np.ndarray:
    """The largest difference of each row from the same in float64, of standard normal numbers."""
    rng = np.random.default_rng(0)
    a, w, b = (rng.standard_normal(shape) for shape in ((rows, 3, 4), (3, 4, 3), (rows, 3, 4, 3)))
    wanted = (w[None] * b).sum(-1) + (a if fn is added else 0)
    found = (jax.jit(fn) if compiled else fn)(*map(jnp.float32, (a, w, b)))
    return np.abs(np.asarray(found) - wanted).max(axis=(1, 2))


wrong = np.flatnonzero(errors(added, 4000, True) > 0.1)
right = {
    "not compiled": errors(added, 4000, False).max(),
    "the sum alone": errors(total, 4000, True).max(),
    "2,700 rows": errors(added, 2700, True).max(),
}
print(f"4,000 rows: {len(wrong)} are wrong, from row {wrong[:1]} on; {', '.join(f'{k}: {v:.0e}' for k, v in right.items())}")
assert max(right.values()) < 1e-5
assert len(wrong) > 1000, "the behaviour has changed"
PY
