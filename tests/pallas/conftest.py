"""One test class per kernel, run over its implementations: the reference implementation, the kernel interpreted, the
kernel on a GPU."""

import functools

import jax
import pytest

SMALL_GROUP = 128  # so that small vocabularies span several groups and blocks


def _reference(reference, kernel):
    return _jitted(reference)


def _interpreted(reference, kernel):
    return _jitted(functools.partial(kernel, interpret=True))


def _compiled(reference, kernel):
    return _jitted(kernel)


def _jitted(function):
    """``jax.jit``, once for each function of a module and the arguments that are bound: all tests share their programs."""
    inner = function if isinstance(function, functools.partial) else functools.partial(function)
    if "<locals>" in inner.func.__qualname__:
        return jax.jit(function)
    return _once(inner.func, inner.args, tuple(sorted(inner.keywords.items())))


@functools.cache
def _once(function, args, keywords):
    return jax.jit(functools.partial(function, *args, **dict(keywords)))


@pytest.fixture(
    params=[
        pytest.param(_reference, id="reference"),
        pytest.param(_interpreted, id="interpreted"),
        pytest.param(_compiled, id="compiled", marks=pytest.mark.gpu),
    ]
)
def implementation(request, monkeypatch):
    """(reference, kernel) -> the one that this run is about, jitted."""
    if request.param is not _compiled:
        monkeypatch.setattr("jspec.pallas.sampling.warped_logits.GROUP", SMALL_GROUP)
        monkeypatch.setattr("jspec.pallas.sampling.top_k_top_p._BLOCK", 2 * SMALL_GROUP)
        monkeypatch.setattr(
            "jspec.pallas.sampling.top_k_top_p._UNROLL", 2
        )  # half of what an interpreted kernel compiles
    return request.param
