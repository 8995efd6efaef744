"""Rotations of weights that compressed-tensors says a checkpoint has (``transform_config``).

A rotation of weights alone is in the stored weights, and nothing is left to do: R1 and R2 of SpinQuant (Liu et al., 2024)
rotate the outputs of some maps and the inputs of those that read them, and cancel out. Rotations of inputs, outputs, queries
or cached keys have to be computed for each token, which is not done here."""

from jspec.checkpoints.files.fields import Fields
from jspec.quantization.formats import INSTEAD

OF_WEIGHTS = ("weight_input", "weight_output")  # the locations that are fused into weights before they are quantised


def require_fused(fields: Fields):
    """Raise a ``Refusal`` if some rotation of a ``quantization_config`` is not one of weights alone."""
    transforms = fields.nested("transform_config")
    groups = None if transforms is None else transforms.nested("config_groups")
    if groups is None:
        return
    for name in list(groups.raw):
        scheme = groups.nested(name)
        listed = None if scheme is None else scheme.raw.get("apply")
        if scheme is None or not isinstance(listed, list) or not all(isinstance(each, dict) for each in listed):
            raise groups.refuse(name, "an object with a list of objects, apply")
        for i, each in enumerate(listed):
            if each.get("location") not in OF_WEIGHTS:
                at, read = Fields(each, fields.where, f"{scheme.prefix}apply[{i}]."), " or ".join(map(repr, OF_WEIGHTS))
                raise at.refuse("location", f"{read}, because only rotations of weights are read; {INSTEAD}")
