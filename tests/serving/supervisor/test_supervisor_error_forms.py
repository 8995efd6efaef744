"""A supervisor's own errors have the form of the endpoint that was asked."""

import json

from supervised_worker import CHUNK, EVENT, STREAM, chunk, run, running


def test_errors_of_messages_have_anthropics_form():
    """Anthropic's clients leave out events without a name, and would take what has come for the whole message."""

    async def die(asked, reader, writer):
        writer.write(STREAM + chunk(EVENT))

    async def test():
        async with running(die, keys=["secret"]) as (_, side, client):
            refused = await client.post("/v1/messages", json=CHUNK)
            assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
            assert refused.json()["type"] == "error"
            client.headers["x-api-key"] = "secret"
            name, data = (await client.post("/v1/messages", json=CHUNK)).content.removeprefix(EVENT).split(b"\n", 1)
            assert name == b"event: error"
            told = json.loads(data.removeprefix(b"data: "))
            assert (told["type"], told["error"]["type"]) == ("error", "overloaded_error")
            side.shut("it was lost")
            lost = await client.post("/v1/messages", json=CHUNK)
            assert (lost.status_code, lost.json()["error"]) == (
                529,
                {"type": "overloaded_error", "message": "it was lost"},
            )
            other = await client.post("/v1/messages", json=CHUNK, headers={"host": "evil.example"})
            assert (other.status_code, other.json()["error"]["type"]) == (403, "permission_error")

    run(test)
