"""Write docs/results/published-heads.md from the tests' table of published drafters, by reading each of them.

PYTHONPATH=.:tests/helpers python docs/published_heads.py                       # writes the page
PYTHONPATH=.:tests/helpers python docs/published_heads.py --check               # writes nothing; exits 1 if the page differs
"""

import argparse
import json
import pathlib
import re
import sys
import tempfile
import warnings

from public_heads import EVERY, Recognised
from safetensors.numpy import load_file

from convert.folders import read_draft_config
from jspec.checkpoints.files.fields import Fields
from jspec.checkpoints.files.refusal import Refusal
from jspec.checkpoints.layouts import kinds, mtp
from jspec.checkpoints.layouts.options import OpenSetting
from jspec.checkpoints.layouts.published import PUBLISHED

PAGE = pathlib.Path(__file__).parent / "results" / "published-heads.md"
LAYOUTS = "../../jspec/checkpoints/layouts"
INTRODUCTION = """# Published drafters

What jspec makes of drafters that are published, by the descriptions and the code that their sources have. **No weights were
at hand**: each row is a tiny drafter with the keys of config.json and the tensors that its publisher's code writes, which
`docs/published_heads.py` gives to jspec's recognition; `tests/helpers/public_heads.py` has them, and a test holds this page
to what they give. So a row says which layout is recognised and what is asked for or refused, not that the file on the hub
was read, or how many of its drafts are accepted. "As the file says" stands where no source states the draft vocabulary.

| published drafter | kind | target | tokens that it drafts | windows | read by | what jspec does | source |
|---|---|---|---|---|---|---|---|
"""
END = """
"Asks" means that config.json leaves open what changes the drafts: the text is the target's in any case, and `jspec doctor`
measures which answer is right ([The doctor](../guides/doctor.md)). A drafter in the target's own checkpoint is asked for
with `draft="mtp"`. [Drafting](../guides/drafting.md) says what every kind of drafter does.
"""


def row_of(head: Recognised, folder: pathlib.Path) -> list[str]:
    """The cells of a row, by what jspec makes of the drafter when it is written to ``folder``."""
    head.write(folder)
    page, windows, layout = head.page, "-", "-"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what is read with a warning is no plain "read"
            config = read_draft_config(folder, **head.said)
    except OpenSetting as asked:
        does, layout = f"asks for `--{asked.name.replace('_', '-')}`", layout_of(head, folder)
        known = PUBLISHED.get(head.names.split(",")[0])
        does += ", which it knows of a folder of this name" if known and not known.disputed else ""
    except Refusal as refusal:
        why = re.sub(r"^\S+: ", "", str(refusal))
        does = "refused: " + re.split(r"; (?!convert)| \(allow", why)[0]
    else:
        does, layout = "read", layout_of(head, folder)
        if (layers := getattr(config, "layers", None)) is not None:
            each = layers.windows
            windows = "in all layers" if each and all(each) else "in some layers" if any(each) else "none"
    return [head.names, page.kind, page.target, page.vocabulary, windows, layout, does, f"[link]({page.source})"]


def layout_of(head: Recognised, folder: pathlib.Path) -> str:
    """A link to the file of jspec that reads the layout."""
    if head.said.get("mtp"):
        chosen = mtp.FORMAT
    else:
        fields = Fields(json.loads((folder / "config.json").read_text()), "config.json")
        [file] = folder.glob("*.safetensors")
        chosen = kinds._format_of_files(fields, load_file(file))
    name = chosen.read.__module__.rpartition(".")[2]
    return f"[{name}.py]({LAYOUTS}/{name}.py)"


def page() -> str:
    """The page, from the table."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for i, head in enumerate(EVERY):
            rows.append(row_of(head, pathlib.Path(folder) / str(i)))
    return INTRODUCTION + "".join(f"| {' | '.join(row)} |\n" for row in rows) + END


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page differs")
    written = page()
    if not parser.parse_args(arguments).check:
        PAGE.write_text(written)
    elif PAGE.read_text() != written:
        print(f"{PAGE} is not what the drafters give; run docs/published_heads.py", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
