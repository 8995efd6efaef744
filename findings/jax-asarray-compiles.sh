#!/usr/bin/env bash
# jax 0.10.2 (0.11.2 alike): jax.numpy.asarray and jax.numpy.array of a NumPy array compile a program for each new shape and dtype.
#
# Nothing is converted: the dtype is the array's own. jax.device_put of such arrays compiles nothing. Seen: 10 compilations for 10 shapes,
# none for the same shapes again, 10 for 10 others, and none with device_put. What counts is /jax/core/compile/backend_compile_duration.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check jax==0.10.2
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY'
import jax
import numpy as np

compiled = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **kwargs: compiled.append(event) if event.endswith("backend_compile_duration") else None
)


def compilations(put, sizes):
    compiled.clear()
    for size in sizes:
        jax.block_until_ready(put(np.arange(size, dtype=np.float32)))
    return len(compiled)


first = range(1, 11)
counts = {
    "asarray, 10 shapes": compilations(jax.numpy.asarray, first),
    "the same shapes again": compilations(jax.numpy.asarray, first),
    "array, 10 others": compilations(jax.numpy.array, range(11, 21)),
    "device_put, 10 others": compilations(jax.device_put, range(21, 31)),
}
print(counts)
assert list(counts.values()) == [10, 0, 10, 0], "the behaviour has changed"
PY
