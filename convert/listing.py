"""The text that ``jspec-convert --dry-run`` prints: what a conversion would do, from config and headers alone."""

from collections.abc import Iterator

from jspec.checkpoints.huggingface.model import HuggingFaceModel
from jspec.checkpoints.tensors.layout import Layout
from jspec.checkpoints.tensors.params import stored_params


def listing(source: HuggingFaceModel, dtype: str) -> Iterator[str]:
    """The lines of the text.

    The first says what was recognised. Then comes a line for each tensor that is there, as in
    ``model.layers.0.self_attn.k_proj.weight -> layers.0.attention.qkv.weight[4096:5120]  [1024, 4096]  bfloat16 ->
    bfloat16``, and then one for each tensor that is ignored, missing, unused or of a wrong dtype or shape. The last counts.

    Args:
      source: the open folder.
      dtype: the dtype of the params that are neither quantised nor integers.
    """
    yield describe(source.layout, source.target_name)
    yield from (f"note: {note}" for note in source.layout.notes)
    width = max(map(len, source.table))
    shapes, stored = source.shapes, stored_params(source.config, dtype)
    for name, at in source.table.items():
        if name not in source.tensors:
            continue
        tensor = source.tensors[name]
        is_whole = shapes[at.param] == at.shape
        place = at.param if is_whole else f"{at.param}[{at.start}:{at.start + at.shape[0]}]"
        yield f"{name:{width}} -> {place}  {list(tensor.shape)}  {tensor.dtype} -> {stored[at.param][1]}"
    for name in source.ignored:
        yield f"ignored: {name}"
    for name in source.missing:
        yield f"missing: {name} {list(source.table[name].shape)}"
    for name in source.unused:
        yield f"unused: {name} {list(source.tensors[name].shape)} in {source.tensors[name].file}"
    for name, expected in source.mistyped.items():
        yield f"wrong dtype: {name} {source.tensors[name].dtype}, expected {expected}"
    for name in source.misshapen:
        yield f"wrong shape: {name} {list(source.tensors[name].shape)}, expected {list(source.table[name].shape)}"
    total = source.config.num_parameters
    count = len(source.config.stored_params())
    scales = f" and {count} scales" if count else ""
    yield f"{len(source.table)} tensors -> {len(stored) - count} params{scales}, {total:,} parameters, {dtype}"


def matches(source: HuggingFaceModel) -> bool:
    """Whether the files hold exactly the tensors that the config needs, in the right shapes and dtypes."""
    return not (source.missing or source.unused or source.misshapen or source.mistyped)


def describe(layout: Layout, target_name: str | None) -> str:
    """One line for the user that says what was recognised; ``target_name`` is the target that the checkpoint names."""
    target = f", verifier {target_name}" if target_name else ""
    return f"recognised: {layout.label}, {layout.config.summary}{target}"
