"""The page of kernels that stand on Triton's lowering, held to the code and to what Mosaic GPU lowers."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/results/lowerings.md").read_text()


def test_every_kernel_of_the_lowering_is_listed():
    modules = (path for path in (ROOT / "jspec").rglob("*.py") if path.name != "triton.py")
    callers = {str(path.relative_to(ROOT)) for path in modules if re.search(r"\bkernel_call\b", path.read_text())}
    listed = re.findall(r"^\| `(\S+)` \|", PAGE, re.MULTILINE)
    assert sorted(listed) == sorted(callers)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="older versions have other names in this lowering")
def test_mosaic_lowers_what_the_page_says():
    from benchmarks.kernels.mosaic_limits import CASES, refusal

    assert [name for name, case in CASES.items() if refusal(*case) is None] == [
        "numbers one by one",
        "noise of integers",
        "a sum of all",
    ]
