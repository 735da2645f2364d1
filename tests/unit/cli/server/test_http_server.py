"""Connections: clients that send their headers slowly or not at all, and what is no HTTP."""

import asyncio
import json
from contextlib import suppress

import pytest

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

import uvicorn

from dptrain.cli.server import http_server


async def slow_app(scope, receive, send):
    """Answer later than a client may take for its headers."""
    await asyncio.sleep(0.3)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


def received(*requests: bytes) -> list[bytes]:
    """Return all that comes on a connection for each of some bytes."""

    async def ask_all():
        options = {"ws": "none", "lifespan": "off", "log_config": None}
        server = http_server._Server(uvicorn.Config(slow_app, http=http_server._Protocol, **options))
        listener = http_server.bind("127.0.0.1", 0)
        address = listener.getsockname()
        serving = asyncio.create_task(server.serve([listener]))
        answers = [await asyncio.wait_for(ask(address, request), 60) for request in requests]
        server.should_exit = True
        await serving
        return answers

    async def ask(address, request):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(request)
        answer = b""
        with suppress(ConnectionResetError):
            while part := await reader.read(1000):
                answer += part
        writer.close()
        return answer

    return asyncio.run(ask_all())


def test_headers_that_do_not_come_end_a_connection_and_answers_in_the_making_do_not(monkeypatch):
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", 0.1)
    silent, begun, slow, second = received(
        b"",
        b"GET / HTTP/1.1\r\nHost: a",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\n\r\nGET / HTTP/1.1\r\nHo",
    )
    assert silent == begun == b""
    for answer in (slow, second):
        assert answer.startswith(b"HTTP/1.1 200")
        assert answer.count(b"HTTP/1.1") == 1


def test_what_is_no_http_gets_one_line():
    (answer,) = received(b"\x16\x03\x01 TLS\r\n\r\n")
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert [*json.loads(body)] == ["error"]
