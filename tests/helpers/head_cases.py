"""Every tiny head that there is, and equality of params to the bit."""

import numpy as np
import tiny_heads as heads

from convert import convert, load_draft

SAID = {"layer-ids": {"aux_convention": "output_of"}, "norm-output": {"norm_output": "recycled"}}
ALL = [(file, case) for file, cases in heads.CASES.items() for case in cases]


def write(file, case, folder):
    """A tiny head in ``folder``, what has to be said of it, and whether it is a pickle."""
    make, keys = heads.CASES[file][case]
    return make(folder, **keys), SAID.get(case, {}), str(keys.get("file", "")).endswith(".pt")


def same(ours, theirs):
    """Assert that two dicts of params are equal to the bit."""
    assert ours.keys() == theirs.keys()
    for name, array in theirs.items():
        assert ours[name].dtype == array.dtype, name
        assert np.array_equal(ours[name], array), name


def reads_as(folder, plain, tmp_path, **said):
    """Assert that ``folder``, read as it is and converted, is the same head as the folder ``plain``."""
    config, params = load_draft(plain)
    report = convert(folder, tmp_path / "converted", verify="shapes", **said)
    for found in (load_draft(folder, **said), load_draft(tmp_path / "converted")):
        assert found[0] == config
        same(found[1], params)
    return report
