"""A model behind Ray Serve: engines scaled with the load, and streamed texts.

Run it with ``python examples/ray_serve.py``, and ask it with
``curl -N http://127.0.0.1:8000/ -d '{"prompt": "import os", "max_tokens": 32}'``. It needs ``pip install 'jspec[ray]'``.
Fields besides ``prompt`` are those of ``jspec.SamplingParams``. ``jspec serve`` is one engine that speaks OpenAI's
protocol; this is how to have several behind one address.
"""

import argparse
import contextlib
import json

from ray import serve
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse

import jspec
from jspec.commands.demo import FAMILY

ROWS = 8  # requests that an engine decodes together


@serve.deployment(max_ongoing_requests=2 * ROWS)
class Completions:
    """An engine in a replica of its own."""

    def __init__(self, target: str, draft: str | None, tensor_parallel: int):
        llm = jspec.load(target, draft, max_batch=ROWS, max_len=256, tensor_parallel=tensor_parallel).warmup()
        self._llm, self._engine = llm, jspec.AsyncEngine(llm)

    async def __call__(self, request: Request) -> Response:
        try:
            fields = json.loads(await request.body())
            asked = self._llm.engine.request(fields.pop("prompt"), **fields)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            return PlainTextResponse(f"{error}\n", status_code=400)
        return StreamingResponse(self._text(asked), media_type="text/plain")

    async def _text(self, asked):
        # Whatever ends this generator early gives the request up, and its row is free for another.
        with contextlib.closing(self._engine.start([asked])) as deltas:
            async for _, delta in deltas:
                if delta.finished and delta.result.finish_reason == "error":
                    raise RuntimeError(f"the request failed: {delta.result.stop_reason}")
                yield delta.text

    def check_health(self):
        """Ray asks this from time to time, and starts another replica when it fails."""
        if self._engine.error is not None:
            raise RuntimeError("the engine failed") from self._engine.error


def application(
    target: str, draft: str | None, engines: int, gpus: float, tensor_parallel: int = 1
) -> serve.Application:
    """The application: one engine, and up to ``engines`` when requests wait. ``gpus`` are those of a shard of its target."""
    scaling = {"min_replicas": 1, "max_replicas": engines, "target_ongoing_requests": ROWS}
    actor = {"num_gpus": gpus * tensor_parallel}
    replicas = Completions.options(autoscaling_config=scaling, ray_actor_options=actor)
    return replicas.bind(target, draft, tensor_parallel)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default=str(FAMILY / "target"))
    parser.add_argument("--draft", default=str(FAMILY / "draft"))
    parser.add_argument("--engines", type=int, default=2, help="the most")
    parser.add_argument("--gpus", type=float, default=0, help="of each engine, or of each shard of its target")
    parser.add_argument("--tensor-parallel", type=int, default=1, help="shards of the target, on GPUs of one node")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    serve.start(http_options={"port": args.port})
    serve.run(application(args.target, args.draft, args.engines, args.gpus, args.tensor_parallel), blocking=True)


if __name__ == "__main__":
    main()
