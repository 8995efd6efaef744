"""Several formats in one checkpoint: which module has which, by names, patterns and classes in config.json."""

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping

from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.quantized.config_fields import Modules, read_modules
from jspec.checkpoints.quantized.format import BlockFormat, StoredFormats

PATTERN = "re:"  # how an entry begins that is a regular expression


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mixed(StoredFormats):
    """Formats of which each is that of some modules.

    Attributes:
      key: of config.json, which says so, for messages.
      names: whole name of a module -> its format.
      patterns: modules and their format, of those without a name of their own; the first counts that includes a module.
      others: the format of all others; None if they are not quantised.
      called: name of a module in jspec -> the names that config.json may have for it.
    """

    key: str
    where: str
    names: Mapping[str, BlockFormat]
    patterns: tuple[tuple[Modules, BlockFormat], ...]
    others: BlockFormat | None
    called: Callable[[str], tuple[str, ...]] = lambda name: (name,)

    def of_module(self, module: str) -> BlockFormat | None:
        called = self.called(module)
        named = next((self.names[name] for name in called if name in self.names), None)
        return named or next((form for modules, form in self.patterns if modules.include(called)), self.others)

    @property
    def ends(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(end for form in self._formats for end in form.ends))

    @property
    def summary(self) -> str:
        return " and ".join(dict.fromkeys(form.summary for form in self._formats))

    @property
    def bytes_each(self) -> str:
        return " or ".join(dict.fromkeys(form.bytes_each for form in self._formats))

    @property
    def _formats(self) -> list[BlockFormat]:
        found = [*self.names.values(), *(form for _, form in self.patterns), self.others]
        return [form for form in dict.fromkeys(found) if form is not None]


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
    formats = list(dict.fromkeys([*(form for _, form in entries), *([] if others is None else [others])]))
    if len(formats) == 1:
        return formats[0]
    listed = [(entry, form) for entry, form in entries if entry.startswith(PATTERN)]
    fields = dataclasses.replace(fields, raw={key: [pattern for pattern, _ in listed]})
    read = read_modules(fields, key)
    patterns = tuple(
        (dataclasses.replace(read, patterns=(pattern,)), form)
        for pattern, (_, form) in zip(read.patterns, listed, strict=True)
    )
    names = {name: form for name, form in reversed(entries) if not name.startswith(PATTERN)}
    return Mixed(key=fields.prefix + key, where=fields.where, names=names, patterns=patterns, others=others)


def read_mixed(
    fields: Fields,
    key: str,
    read: Callable[[Fields], BlockFormat | None],
    pattern: Callable[[str], str],
    others: BlockFormat | None,
) -> StoredFormats:
    """``mixed`` of an object ``{module: settings}``.

    Args:
      fields: the object around it.
      key: its key.
      read: returns the format of some settings; None where the tensors say which it is, as of modules that are plain.
      pattern: an entry's key as ``mixed`` takes it.
      others: as for ``mixed``.
    """
    table, entries, known = fields.nested(key), [], {}
    for module in () if table is None else table.raw:
        settings = table.nested(module) or Fields({}, table.where, f"{table.prefix}{module}.")
        text = json.dumps(dict(settings.raw), sort_keys=True)
        if text not in known:  # a checkpoint may list thousands of modules
            known[text] = read(settings)
        if known[text] is not None:
            entries.append((pattern(module), known[text]))
    return mixed(fields, key, entries, others)
