"""Where nothing can be compiled for an H200, tests are skipped and say what is missing."""

import importlib.util

import deviceless
import jax
import pytest


@pytest.fixture
def no_plugins(monkeypatch):
    """As where no plugin of JAX is installed: there is no package ``jax_plugins``, and to ask for a part of it fails."""

    def find_spec(name: str):
        if "." in name:
            raise ModuleNotFoundError(f"No module named {name.partition('.')[0]!r}")

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(jax, "__version_info__", (0, 11, 2))
    monkeypatch.setattr(jax, "__version__", "0.11.2")


@pytest.mark.usefixtures("no_plugins")
def test_without_a_plugin_the_reason_says_what_to_install():
    reason = deviceless.why_not.__wrapped__()
    assert "pip install jax-cuda13-plugin==0.11.2 jax-cuda13-pjrt==0.11.2" in reason
