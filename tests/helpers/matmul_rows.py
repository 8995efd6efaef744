"""Products as the table of their rows sees them: shapes of weights of any format, and other limits for a row, so that small
models have the kernels of large ones."""

import dataclasses

import jax

from jspec.pallas.matmul import table
from jspec.quantization.formats import format_of
from jspec.quantization.weight import Weight


def abstract_weight(stored: str, shape: tuple[int, ...]) -> Weight:
    """Shapes and dtypes of a weight of a format, or of one without, whose dtype ``stored`` is; ``shape`` is (out, in), or
    (N, out, in) for maps of experts or of heads."""
    form = format_of(stored)
    if len(shape) > 2:
        parts, outputs, inputs = shape
        return jax.eval_shape(lambda weight: weight.split(parts), abstract_weight(stored, (parts * outputs, inputs)))
    if form is None:
        return Weight(jax.ShapeDtypeStruct(shape, stored))
    arrays = {name: jax.ShapeDtypeStruct(*array) for name, array in form.arrays(shape).items()}
    return Weight.of(arrays, form, shape[1])


def set_limits(monkeypatch, name: str, **limits):
    """Give the row ``name`` other limits, and lower programs as for a Hopper GPU."""
    assert name in {row.name for row in table.TABLE}
    rows = (dataclasses.replace(row, **limits) if row.name == name else row for row in table.TABLE)
    monkeypatch.setattr(table, "TABLE", tuple(rows))
    monkeypatch.setattr(table, "on_hopper", lambda: True)
