"""Host memory of a load: a few pieces of parameters, however large a parameter is and however many there are."""

import tracemalloc

import numpy as np
import pytest

from benchmarks.host.memory import FORMATS, write
from jspec.checkpoints.checkpoint import Checkpoint
from jspec.checkpoints.files import fp8_numbers, ranges
from jspec.checkpoints.quantized import bitsandbytes
from jspec.models.params import Placed, abstract_params, place
from jspec.quantization import codes

PIECE = 1 << 17  # bytes
SIZES = 256, 8192, 512, 3


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    """Everything is cut into pieces as those of large models are."""
    monkeypatch.setattr(ranges, "SHORTEST", 1)
    for module, name in ((codes, "_AT_ONCE"), (bitsandbytes, "_AT_ONCE"), (fp8_numbers, "_PIECE")):
        monkeypatch.setattr(module, name, 1 << 12)


def most_of_host(config, params) -> int:
    """The most bytes that Python and NumPy take meanwhile, when every array is sent and then dropped."""
    arrays = abstract_params(config, "bfloat16").items()
    wanted = [Placed(name, [()], array.shape, array.dtype, [None]) for name, array in arrays]
    for _ in place(params, wanted):
        pass  # everything is compiled
    tracemalloc.start()
    try:
        for _ in place(params, wanted):
            pass
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("form", FORMATS)
def test_host_memory_is_that_of_a_few_pieces(tmp_path, monkeypatch, form):
    """With parts as large as maps it is more, which shows that the measure tells."""
    write(tmp_path / "folder", form, SIZES)
    most = {}
    for together in (PIECE, 1 << 30):
        monkeypatch.setattr(ranges, "TOGETHER", together)
        config, params = Checkpoint.open(tmp_path / "folder").language_model("bfloat16")
        most[together] = most_of_host(config, params)
    assert sum(np.prod(shape) for shape in params.shapes.values()) > 10e6
    assert most[PIECE] < 24 * PIECE < most[1 << 30]
