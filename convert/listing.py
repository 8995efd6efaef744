"""What a conversion would do, as lines of text, from config and headers alone."""

from collections.abc import Iterator

from jspec.checkpoints.heads.kinds import describe
from jspec.checkpoints.quantized import stored_params
from jspec.checkpoints.source import Source


def listing(source: Source, dtype: str) -> Iterator[str]:
    """What it is, a line a tensor, ``name -> param[rows]  shape  dtype``, and what is ignored, missing, unused or
    wrong."""
    yield describe(source.layout, source.verifier)
    yield from (f"note: {note}" for note in source.layout.notes)
    width = max(map(len, source.table))
    stacked, stored = source.shapes, stored_params(source.config, dtype)
    for name, rows in source.table.items():
        if name not in source.tensors:
            continue
        tensor = source.tensors[name]
        whole = stacked[rows.param] == rows.shape
        place = rows.param if whole else f"{rows.param}[{rows.start}:{rows.start + rows.shape[0]}]"
        yield f"{name:{width}} -> {place}  {list(tensor.shape)}  {tensor.dtype} -> {stored[rows.param][1]}"
    for name in source.ignored:
        yield f"ignored: {name}"
    for name in source.missing:
        yield f"missing: {name} {list(source.table[name].shape)}"
    for name in source.unused:
        yield f"unused: {name} {list(source.tensors[name].shape)} in {source.tensors[name].file}"
    for name in source.misshapen:
        yield f"wrong shape: {name} {list(source.tensors[name].shape)}, expected {list(source.table[name].shape)}"
    total = source.config.num_parameters
    scales = f" and {len(stored) - len(stacked)} scales" if len(stored) > len(stacked) else ""
    yield f"{len(source.table)} tensors -> {len(stacked)} params{scales}, {total:,} parameters, {dtype}"


def matches(source: Source) -> bool:
    """Whether the tensors are exactly those that the architecture needs."""
    return not (source.missing or source.unused or source.misshapen)
