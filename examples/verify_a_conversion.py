"""A Hugging Face checkpoint converted, compared with transformers, checked for damage, and loaded.

Run it with ``python examples/verify_a_conversion.py``. Comparing logits needs torch; without it, shapes are compared.
"""

import importlib.util
import pathlib
import tempfile

import jspec
from convert import check, convert
from jspec.commands.demo import FAMILY


def main():
    with tempfile.TemporaryDirectory() as folder:
        converted = pathlib.Path(folder, "converted")
        verify = "logits" if importlib.util.find_spec("torch") else "shapes"
        report = convert(FAMILY / "draft", converted, dtype="float32", verify=verify)
        print(report.recognised)
        for note in report.notes:
            print(note)

        assert check(converted) == []  # hashes every file again
        (converted / "config.json").write_text("{}")
        print(check(converted))

        convert(FAMILY / "draft", converted, dtype="float32", overwrite=True)
        llm = jspec.load(converted, max_batch=1, max_len=64)
        print(repr(jspec.generate(llm, "def main(", temperature=0.0, max_tokens=8).text))


if __name__ == "__main__":
    main()
