"""Draft heads whose weights and outputs are stored in golden/, as their original implementations computed them."""

import functools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from convert import load_draft
from jspec.config.heads.block import MARKOVS
from jspec.models import build_head

TOLERANCE = 1e-5
GOLDEN = Path(__file__).parents[1] / "golden"


@functools.cache
def golden(file: str) -> dict[str, np.ndarray]:
    """The arrays of a file; ``mtp/qwen3`` names those of one case of ``mtp.npz``."""
    file, _, case = file.partition("/")
    start = f"{case}/" if case else ""
    with np.load(GOLDEN / f"{file}.npz") as arrays:
        return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}


def checkpoint(folder: Path, file: str, markov: str | None = None, **keys) -> Path:
    """The draft head of a golden file, in the layout of its original."""
    original, mark = golden(file), f"w.{markov}."
    weights = {name.removeprefix("w."): array for name, array in original.items() if name.startswith("w.")}
    weights = {name: array for name, array in weights.items() if name.split(".")[0] not in MARKOVS}
    weights |= {name.removeprefix(mark): array for name, array in original.items() if name.startswith(mark)}
    config = json.loads(str(original["config_json"]))
    config |= {"markov_head_type": markov} if markov else {}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, **keys}))
    save_file({name: np.ascontiguousarray(array) for name, array in weights.items()}, folder / "model.safetensors")
    return folder


class Lender:
    """The target as far as a draft head borrows from it."""

    def __init__(self, file: str):
        self.embedding, self.head = (jax.device_put(golden(file)[name]) for name in ("embed", "lm_head"))

    def embed(self, tokens):
        return self.embedding[tokens]

    def logits(self, hidden):
        return jnp.einsum("...d,vd->...v", hidden, self.head, precision="highest")


def head_of(path: Path):
    config, params = load_draft(path)
    return build_head(config, params)


def features(file: str):
    original = golden(file)
    streams = sorted(
        (name for name in original if name.startswith("S_") and name[2:].isdigit()), key=lambda s: int(s[2:])
    )
    return jax.device_put(np.concatenate([original[name] for name in streams], axis=-1))[None]


def assert_close(actual, expected):
    assert actual.shape == expected.shape
    assert np.abs(np.asarray(actual) - expected).max() < TOLERANCE * max(np.abs(expected).max(), 1)
