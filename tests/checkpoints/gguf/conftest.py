"""Files of the models of ``gguf_models``, which tests of several files read."""

import pytest

from jspec.checkpoints.gguf.header import read_header


@pytest.fixture(scope="package")
def saved(tmp_path_factory):
    """The folder of a model of ``gguf_models.MODELS``, which has its file ``model.gguf``."""
    from gguf_models import folders  # which needs transformers and gguf

    return folders(tmp_path_factory)


@pytest.fixture(scope="package")
def header(saved):
    """The header of the file of such a model."""
    return lambda name: read_header(saved(name) / "model.gguf")
