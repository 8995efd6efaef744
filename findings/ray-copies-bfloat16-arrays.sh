#!/usr/bin/env bash
# ray 2.60.0 with ml_dtypes 0.5.4 and numpy 2.4.0: arrays of bfloat16 go through the object store as copies, arrays of float32 as views.
#
# Ray's object store hands NumPy arrays to every process of a host as read-only views of one shared copy. It relies on pickle's protocol 5, in
# which NumPy gives the memory of an array apart ("out of band"). NumPy does so for its own dtypes alone: of a dtype that ml_dtypes registers,
# bfloat16 or float8_e4m3fn, the bytes go into the pickle itself, and each ray.get makes a writable array of its own. No warning says so, and
# weights that a trainer sends to N engines take N times the memory. The same numbers viewed as uint16 or uint8 are shared again.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install --quiet --disable-pip-version-check ray==2.60.0 numpy==2.4.0 ml_dtypes==0.5.4
RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO=0 "$folder/venv/bin/python" - <<'PY'
import logging
import pickle

import ml_dtypes
import numpy as np
import ray

ray.init(num_cpus=1, include_dashboard=False, logging_level=logging.ERROR, object_store_memory=100 << 20)
zeros = np.zeros(1 << 20, np.float32)
arrays = {
    "float32": zeros,
    "bfloat16": zeros.astype(ml_dtypes.bfloat16),
    "float8_e4m3fn": zeros.astype(ml_dtypes.float8_e4m3fn),
    "bfloat16 as uint16": zeros.astype(ml_dtypes.bfloat16).view(np.uint16),
}
shared = {}
for name, array in arrays.items():
    apart = []
    inside = len(pickle.dumps(array, protocol=5, buffer_callback=apart.append))
    got = ray.get(ray.put(array))
    shared[name] = not got.flags.writeable
    print(f"{name}: {inside:,} bytes in the pickle, {len(apart)} buffers apart; ray.get gives {'a view' if shared[name] else 'a copy'}")
ray.shutdown()
assert shared["float32"] and shared["bfloat16 as uint16"], "the behaviour has changed"
assert not shared["bfloat16"] and not shared["float8_e4m3fn"], "the behaviour has changed"
PY
