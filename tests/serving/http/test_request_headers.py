"""Requests for other hosts and requests whose end is ambiguous are refused, and every request has an id."""

import asyncio

import httpx
import pytest

from jspec.serving.http.headers import LOOPBACK, HeaderChecks, allowed_hosts_of


async def tell_id(scope, receive, send):
    """Answers with the id of the request, and with one of its own in the header."""
    request_id = dict(scope["headers"])[b"x-request-id"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"X-Request-Id", b"other")]})
    await send({"type": "http.response.body", "body": request_id})


def ask(allowed, headers) -> httpx.Response:
    async def asked():
        transport = httpx.ASGITransport(HeaderChecks(tell_id, allowed))
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            return await client.post("/", headers=headers, content=b"x")

    return asyncio.run(asked())


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1", "127.0.0.1:80", "[::1]", "[::1]:8000"])
def test_hosts_of_this_machine_are_served(host):
    assert ask(LOOPBACK, {"host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "localhost.", "", "[::1", "127.0.0.1:80:80", "a@b"]
)
def test_other_hosts_are_refused(host):
    answer = ask(LOOPBACK, {"host": host})
    assert answer.status_code == 403
    assert answer.headers["connection"] == "close"
    assert "expected one of localhost, 127.0.0.1, [::1] (--allowed-hosts)" in answer.json()["error"]["message"]
    assert ask(None, {"host": host}).status_code == ask(["*"], {"host": host}).status_code == 200


@pytest.mark.parametrize(
    ("given", "address", "host", "expected"),
    [
        (None, "127.0.0.1", "localhost", LOOPBACK),
        (None, "127.0.0.2", "Here", (*LOOPBACK, "127.0.0.2", "here")),
        (None, "::1", "::1", LOOPBACK),
        (None, "0.0.0.0", "0.0.0.0", None),
        (None, "192.168.0.7", "server", None),
        (None, "fe80::1%eth0", "fe80::1%eth0", None),
        (["api.example"], "127.0.0.1", "127.0.0.1", ("api.example",)),
    ],
)
def test_hosts_follow_from_the_address(given, address, host, expected):
    assert allowed_hosts_of(given, address, host) == expected


def test_a_body_with_two_lengths_is_refused():
    answer = ask(None, {"content-length": "1", "transfer-encoding": "chunked"})
    assert answer.status_code == 400
    assert answer.headers["connection"] == "close"
    assert "both Content-Length and Transfer-Encoding" in answer.json()["error"]["message"]


@pytest.mark.parametrize("given", ["a", "req_1.2-3", "A" * 128])
def test_the_clients_id_is_kept(given):
    answer = ask(None, {"x-request-id": given})
    assert answer.text == given
    assert answer.headers.get_list("x-request-id") == [given]


@pytest.mark.parametrize("given", [None, "", "A" * 129, "a b", "a\tb", 'a"b', "é".encode()])
def test_other_requests_get_an_id(given):
    answers = [ask(None, {} if given is None else {"x-request-id": given}) for _ in range(2)]
    assert all(len(answer.text) == 32 and answer.headers["x-request-id"] == answer.text for answer in answers)
    assert answers[0].text != answers[1].text


def test_refusals_have_an_id():
    answer = ask(LOOPBACK, {"host": "evil.example", "x-request-id": "mine"})
    assert (answer.status_code, answer.headers["x-request-id"]) == (403, "mine")
