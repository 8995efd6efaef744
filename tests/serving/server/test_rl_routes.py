"""vLLM's routes for a trainer: pause, sleep, new weights from folders, and who may ask for them."""

import argparse
import asyncio
import shutil
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from openai_server import ask, family, service_of
from safetensors.numpy import load_file, save_file

from jspec.commands.demo import FAMILY
from jspec.serving.http.auth import ENVIRONMENT, Keys
from jspec.serving.http.settings import settings_of
from jspec.serving.server import command
from jspec.serving.server.app import make_app
from jspec.serving.server.rl_routes import RLRoutes, rl_routes_of

PROMPT = {"prompt": "def main(", "max_tokens": 8, "temperature": 0}
PATHS = [
    *("/pause", "/resume", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights", "/update_weight_version"),
    *("/is_paused", "/is_sleeping", "/weight_info", "/get_world_size"),
]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A folder with checkpoints: one that the target takes, one of another model, and a link."""
    root = tmp_path_factory.mktemp("weights")
    shutil.copytree(FAMILY / "target", root / "step 1")
    tensors = load_file(root / "step 1" / "model.safetensors")
    changed = {name: x * np.asarray(1.25, x.dtype) if x.ndim > 1 else x for name, x in tensors.items()}
    save_file(changed, root / "step 1" / "model.safetensors", metadata={"format": "pt"})
    shutil.copytree(FAMILY / "draft", root / "other")
    (root / "link").symlink_to(FAMILY / "target")
    (root / "cut.gguf").write_bytes(b"GGUF")
    (root / "link.gguf").symlink_to(root / "cut.gguf")
    return root


@pytest.fixture
def client(root):
    """A client of a server with the routes; the model has its own weights again afterwards, and goes on."""
    service: Any = service_of(family())
    app = make_app(service, RLRoutes(root.resolve()))

    class Client:
        def __call__(self, method: str, path: str, body: Any = None) -> httpx.Response:
            return asyncio.run(self.asked(method, path, body))

        async def asked(self, method: str, path: str, body: Any = None) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
                return await asyncio.wait_for(http.request(method, path, json=body), 120)

    yield Client()
    llm: Any = service.llm
    llm.wake_up()
    llm.resume()
    llm.restore()
    asyncio.run(service.engine.close())


def text(client) -> str:
    answer = client("POST", "/v1/completions", PROMPT)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["text"]


def test_new_weights_come_from_a_folder_below_the_root(client, root):
    before, compiled = text(client), family().engine.num_compilations
    answer = client("POST", "/update_weights", {"path": "step 1", "weight_version": "one"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["weight_version"] == "one"
    after = text(client)
    assert after != before
    assert client("GET", "/weight_info").json() == {"weight_version": "one", "complete": True}
    assert client("POST", "/update_weight_version", {"weight_version": 7}).json() == {"weight_version": 7}
    assert family().generate("def main(", max_tokens=1).weights_versions == ((7, 0),)  # pyright: ignore
    asked = {"token_ids": [292], "sampling_params": {"max_tokens": 2}}
    [choice] = client("POST", "/inference/v1/generate", asked).json()["choices"]
    assert choice["weight_versions"] == [{"version": 7, "start": 0, "end": 2}]
    family().restore()
    assert text(client) == before
    assert client("POST", "/update_weights", {"path": str(root.resolve() / "step 1")}).status_code == 200
    assert text(client) == after
    assert family().engine.num_compilations == compiled


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"path": ".."}, "path='..': expected a folder below"),
        ({"path": "step 1/../step 1"}, "expected a folder below"),
        ({"path": "link"}, "path='link': expected a folder below"),
        ({"path": "/etc"}, "path='/etc': expected a folder below"),
        ({"path": "nothing"}, "expected a folder below"),
        ({"path": "x" * 5000}, "expected a folder below"),
        ({"path": 3}, "path=3: expected text"),
        ({}, "path=None: expected text"),
        ({"path": "step 1", "names": "jspec"}, "names is unknown"),
        ({"path": "step 1", "weight_version": True}, "weight_version=True"),
        ({"path": "other"}, "expected"),  # the weights of another model
        ({"path": "cut.gguf"}, "cut.gguf: has the version of 4 bytes at 4"),
        ({"path": "link.gguf"}, "expected a folder below"),
    ],
)
def test_what_is_not_such_a_folder_is_refused(client, body, said):
    before = text(client)
    answer = client("POST", "/update_weights", body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    assert text(client) == before


def test_a_paused_server_keeps_requests_waiting(client):
    """Until it goes on, with weights that came meanwhile."""
    before = text(client)

    async def run() -> str:
        assert (await client.asked("POST", "/pause?mode=keep")).json() == {"status": "paused"}
        assert (await client.asked("GET", "/is_paused")).json() == {"is_paused": True}
        waiting = asyncio.ensure_future(client.asked("POST", "/v1/completions", PROMPT))
        updated = await client.asked("POST", "/update_weights", {"path": "step 1"})
        assert updated.status_code == 200, updated.text
        assert not waiting.done()
        assert (await client.asked("POST", "/resume")).json() == {"status": "resumed"}
        return (await waiting).json()["choices"][0]["text"]

    after = asyncio.run(run())
    assert client("GET", "/is_paused").json() == {"is_paused": False}
    assert after == text(client) != before
    assert client("POST", "/pause?mode=stop").status_code == 400
    assert client("POST", "/pause?clear_cache=no").status_code == 400


def test_a_server_that_sleeps(client):
    before = text(client)
    assert client("POST", "/sleep?level=2").status_code == 200
    assert client("GET", "/is_sleeping").json() == {"is_sleeping": True}
    asleep = client("POST", "/v1/completions", PROMPT)
    assert asleep.status_code == 503
    assert "asleep" in asleep.json()["error"]["message"]
    refused = client("POST", "/update_weights", {"path": "step 1"})
    assert refused.status_code == 409
    assert "asleep" in refused.json()["error"]["message"]
    assert client("POST", "/wake_up").status_code == 200
    assert client("GET", "/weight_info").json()["complete"] is False
    assert client("POST", "/v1/completions", PROMPT).status_code == 503
    assert client("POST", "/update_weights", {"path": "step 1"}).status_code == 200
    assert text(client) != before
    assert client("POST", "/reset_prefix_cache").status_code == 200
    assert client("GET", "/get_world_size").json() == {"world_size": 1}
    assert client("POST", "/sleep?level=3").status_code == 400


@pytest.mark.parametrize("path", PATHS)
def test_no_other_server_has_the_routes(path):
    assert ask(service_of(family()), path, {} if path in PATHS[:7] else None).status_code == 404


@pytest.mark.parametrize("path", PATHS)
def test_each_of_them_needs_the_key(path, root):
    app = make_app(service_of(family(), keys=Keys(["secret"])), RLRoutes(root))

    async def run():
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http:
            return await http.request("POST" if path in PATHS[:7] else "GET", path, json={})

    assert asyncio.run(run()).status_code == 401


def test_options(root, monkeypatch):
    monkeypatch.delenv(ENVIRONMENT, raising=False)

    def routes(*argv: str) -> RLRoutes | None:
        parser = argparse.ArgumentParser()
        command.add_arguments(parser)
        args = parser.parse_args(["target", *argv])
        return rl_routes_of(args, settings_of(args))

    assert routes() is None
    assert routes("--rl-routes", "--api-key", "k") == RLRoutes(None)
    assert routes("--rl-routes", "--api-key", "k", "--weights-root", str(root)) == RLRoutes(root.resolve())
    for argv, said in (
        (("--rl-routes",), "rl_routes=True: expected an API key beside it"),
        (("--weights-root", str(root)), "weights_root=.*: expected None without --rl-routes"),
        (("--rl-routes", "--api-key", "k", "--weights-root", "/no/such"), "weights_root='/no/such': expected a folder"),
    ):
        with pytest.raises(ValueError, match=said):
            routes(*argv)
