import shutil

import pytest
from tiny import tiny_checkpoint, tiny_tokenizer
from tiny_folders import SIZES


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    """target and draft, which is the target rounded to bfloat16 and padded to another vocabulary."""
    root = tmp_path_factory.mktemp("checkpoints")
    target = tiny_checkpoint(root / "target", **SIZES)
    draft = tiny_checkpoint(root / "draft", seed=0, dtype="bfloat16", **SIZES | {"vocab_size": 288})
    for folder in (target, draft):
        tiny_tokenizer(folder)
    shutil.copytree(target, root / "ids")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (root / "ids" / name).unlink()
    return root
