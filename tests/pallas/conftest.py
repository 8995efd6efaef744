"""One test class per kernel, run over its implementations: the twin, the kernel interpreted, the kernel on a GPU."""

import functools

import jax
import pytest

SMALL_BLOCK = 128  # so that small vocabularies span several blocks


def _reference(reference, kernel):
    return jax.jit(reference)


def _interpreted(reference, kernel):
    return jax.jit(functools.partial(kernel, interpret=True))


def _compiled(reference, kernel):
    return jax.jit(kernel)


@pytest.fixture(
    params=[
        pytest.param(_reference, id="twin"),
        pytest.param(_interpreted, id="interpreted"),
        pytest.param(_compiled, id="compiled", marks=pytest.mark.gpu),
    ]
)
def implementation(request, monkeypatch):
    """(reference, kernel) -> the one that this run is about, jitted."""
    if request.param is not _compiled:
        for block in ("draw._BLOCK", "residual._BLOCK", "residual._MASS_BLOCK", "threshold._BLOCK"):
            monkeypatch.setattr(f"jspec.pallas.{block}", SMALL_BLOCK)
    return request.param
