"""Other limits for rows of the table of products, so that small models have the kernels of large ones."""

import dataclasses

from jspec.pallas.matmul import table


def set_limits(monkeypatch, name: str, **limits):
    """Give the row ``name`` other limits, and lower programs as for a Hopper GPU."""
    assert name in {row.name for row in table.TABLE}
    rows = (dataclasses.replace(row, **limits) if row.name == name else row for row in table.TABLE)
    monkeypatch.setattr(table, "TABLE", tuple(rows))
    monkeypatch.setattr(table, "on_hopper", lambda: True)
