"""A stand-in of the hub with a few small checkpoints, and an empty local cache."""

from pathlib import Path

import pytest
from hub_server import hub_server
from tiny import tiny_checkpoint, tiny_tokenizer

SIZES = {"vocab_size": 258, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "head_dim": 8}
UNREAD = (
    "README.md",
    "model.Q4_K_M.gguf",
    "pytorch_model.bin",
    "consolidated.safetensors",
    "picture.png",
    "modeling_x.py",
)
UNREAD += ("original/params.json", "onnx/model.onnx", ".gitattributes")


def checkpoint(folder: Path, **settings) -> Path:
    """A small checkpoint, and beside it what repositories have that jspec does not read."""
    tiny_checkpoint(folder, bos_token_id=0, eos_token_id=1, **SIZES, **settings)
    tiny_tokenizer(folder)
    for name in UNREAD:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"unread" * 1000)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("checkpoints")
    checkpoint(root / "target")
    checkpoint(root / "draft", seed=1)
    checkpoint(root / "sharded", shards=3)
    return root


@pytest.fixture
def hub(tmp_path, monkeypatch, folders):
    """A stand-in that huggingface_hub takes for the hub, with two models, and an empty local cache."""
    with hub_server() as hub:
        settings = {"ENDPOINT": hub.url, "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HUB_OFFLINE": False}
        settings["HUGGINGFACE_CO_URL_TEMPLATE"] = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        for constant, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{constant}", value)
        monkeypatch.setattr(
            "huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1000
        )  # so much of a cut file is lost at most
        monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda _: None)
        for name in ("target", "draft", "sharded"):
            hub.host(f"org/{name}", folders / name)
        yield hub
