"""Several formats in one checkpoint: which module has which, by names, patterns and classes in config.json."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.tensor import Tensor
from jspec.checkpoints.quantized.config_fields import Modules, read_modules
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats

PATTERN = "re:"  # how an entry begins that is a regular expression


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(StoredFormats):
    """Formats of which each is that of some modules.

    Attributes:
      formats: all of them.
      ends: the suffixes of the tensors from which their weights are computed.
      names: whole name of a module -> its format.
      patterns: modules and their format, of those without a name of their own; the first counts that includes a module.
      others: the format of all others; None if they are not quantised.
      called: name of a module in jspec -> the names that config.json may have for it.
    """

    formats: tuple[BlockFormat, ...]
    ends: tuple[str, ...]
    names: Mapping[str, BlockFormat]
    patterns: tuple[tuple[Modules, BlockFormat], ...]
    others: BlockFormat | None
    called: Callable[[str], tuple[str, ...]] = lambda name: (name,)

    def of_module(self, module: str, tensors: Mapping[str, Tensor]) -> BlockFormat | None:
        """As ``StoredFormats.of_module``: the first of which the files hold numbers, as some lists name a module twice."""
        called = self.called(module)
        found = [self.names[name] for name in called if name in self.names]
        found += [form for modules, form in self.patterns if modules.include(called)]
        found += [] if self.others is None else [self.others]
        return next((form for form in found if form.has_numbers(module, tensors)), found[0] if found else None)

    @property
    def where(self) -> str:
        return self.formats[0].where

    @property
    def summary(self) -> str:
        return " and ".join(dict.fromkeys(form.summary for form in self.formats))

    @property
    def bytes_each(self) -> str:
        return " or ".join(dict.fromkeys(form.bytes_each for form in self.formats))


def mixed(
    fields: Fields, key: str, entries: Iterable[tuple[str, BlockFormat]], others: BlockFormat | None
) -> StoredFormats:
    """What ``entries`` say: ``Mixed``, or their only format if they have one.

    Args:
      fields: the object that says so.
      key: where in it, for messages.
      entries: (name of a module, or after ``re:`` a pattern; its format). The first pattern that matches counts.
      others: the format of other modules; None if they are not quantised, or their tensors say it.
    """
    entries = list(entries)
    every = [*(form for _, form in entries), *([] if others is None else [others])]
    formats: tuple[BlockFormat, ...] = tuple(dict.fromkeys(every))
    if len(formats) == 1:
        return formats[0]
    listed = [(entry, form) for entry, form in entries if entry.startswith(PATTERN)]
    fields = dataclasses.replace(fields, raw={key: [pattern for pattern, _ in listed]})
    read = read_modules(fields, key)
    # Parts of one list share the time that matching may take.
    parts = [dataclasses.replace(read, patterns=(pattern,), _matched={}) for pattern in read.patterns]
    patterns = tuple(zip(parts, (form for _, form in listed), strict=True))
    names = {name: form for name, form in reversed(entries) if not name.startswith(PATTERN)}
    ends = tuple(dict.fromkeys(end for form in formats for end in form.ends))
    return Mixed(formats=formats, ends=ends, names=names, patterns=patterns, others=others)


def read_mixed(
    fields: Fields,
    key: str,
    read: Callable[[Fields], BlockFormat | None],
    pattern: Callable[[str], str | None],
    others: BlockFormat | None,
) -> StoredFormats:
    """``mixed`` of an object ``{module: settings}``.

    Args:
      fields: the object around it.
      key: its key.
      read: returns the format of some settings; None likewise.
      pattern: an entry's key as ``mixed`` takes it; None where the tensors say the rest, as of modules that are plain.
      others: as for ``mixed``.
    """
    table, known = fields.nested(key) or Fields({}, fields.where), {}
    entries: list[tuple[str, BlockFormat]] = []
    for module in table.raw:
        if (entry := pattern(module)) is None:
            continue
        settings = table.nested(module) or Fields({}, table.where, f"{table.prefix}{module}.")
        text = json.dumps(dict(settings.raw), sort_keys=True)
        if text not in known:  # a checkpoint may list thousands of modules
            known[text] = read(settings)
        if (form := known[text]) is not None:
            entries.append((entry, form))
    return mixed(fields, key, entries, others)
