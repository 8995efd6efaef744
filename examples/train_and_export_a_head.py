"""A draft head trained for a target, written in its public layout, and loaded again to draft.

Run it with ``python examples/train_and_export_a_head.py``. Twenty steps teach a draft head next to nothing; a real run
takes minutes on a GPU, and ``jspec train --help`` shows its options.
"""

import argparse
import pathlib
import tempfile

import jspec
from jspec import cli
from jspec.commands.demo import FAMILY


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = pathlib.Path(folder, "run")
        texts = pathlib.Path(folder, "texts")
        texts.mkdir()
        for source in pathlib.Path(jspec.__file__).parent.glob("*.py"):
            (texts / source.name).write_text(source.read_text())
        sizes = ["--num-draft-tokens", "2", "--inner-size", "32", "--tie"]
        plan = ["--steps", str(args.steps), "--tokens-per-step", "256", "--length", "64", "--prompts", "2"]
        target = ["--target", str(FAMILY / "target"), "--dtype", "float32"]
        data = ["--data", str(texts), "--out", str(run), "--evaluate-every", str(args.steps)]
        assert cli.main(["train", "--method", "mlp", *target, *data, *plan, *sizes]) == 0

        print(sorted(file.name for file in (run / "head").iterdir()))  # the layout that vLLM reads as well
        llm = jspec.load(FAMILY / "target", run / "head", speculation=jspec.Speculation(2), max_batch=1, max_len=64)
        result = jspec.generate(llm, "def main(", temperature=0.0, max_tokens=8)
        print(f"{llm.method}: {result.text!r}, acceptance length {result.stats.mean_acceptance_length:.2f}")


if __name__ == "__main__":
    main()
