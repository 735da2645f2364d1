"""What every request passes: who may ask, how long it may take; and what is written down of it.

An ASGI middleware, so that it sees requests as the server does, before their bodies are read.
"""

import asyncio
import hmac
import ipaddress
import json
import time
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from dptrain.cli.server.log import Log
from dptrain.cli.server.metrics import Metrics
from dptrain.errors import printable

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]

# What a load balancer asks, without a token.
_OPEN_PATHS = ("/v2/health/live", "/v2/health/ready")


class Guard:
    """Checks token and host, limits how long a client may take to read, counts and logs.

    Args:
        app: what answers.
        metrics: counts each request.
        token: what requests must bring, or None for any. Without one, only the names of this machine's loopback are
            taken as Host, so that no page in its user's browser reaches the server under a name of its own.
        log: gets a line for each request, or None.
        timeout: seconds that a client may take to accept a part of its answer.
    """

    def __init__(self, app: App, metrics: Metrics, *, token: str | None, log: Log | None, timeout: float) -> None:
        self._app, self._metrics, self._log, self._timeout = app, metrics, log, timeout
        self._token = None if token is None else f"Bearer {token}".encode()

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        begin, status = time.perf_counter(), 499  # nginx's word for a client that has gone

        async def send_in_time(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            async with asyncio.timeout(self._timeout):
                await send(message)

        headers = dict(scope["headers"])
        refusal = self._refusal(scope["path"], headers)
        try:
            if refusal is None:
                await self._app(scope, receive, send_in_time)
            else:
                await _refuse(send_in_time, *refusal)
        except TimeoutError:  # the client does not read: the server closes the connection of an unfinished answer
            status = 499
        finally:
            seconds = time.perf_counter() - begin
            self._metrics.add_request(scope.get("state", {}).get("route", "other"), status, seconds)
            if self._log is not None:
                self._log.add(_line(scope, status, seconds))

    def _refusal(self, path: str, headers: dict[bytes, bytes]) -> tuple[int, str] | None:
        """Return status and reason of a request that is not let in."""
        if path in _OPEN_PATHS:
            return None
        if self._token is not None:
            if hmac.compare_digest(headers.get(b"authorization", b""), self._token):
                return None
            return 401, "expected the header Authorization: Bearer TOKEN, with the server's token"
        host = headers.get(b"host", b"").decode("latin-1")
        if is_loopback(_host_name(host)):
            return None
        return (
            421,
            f"Host {printable(host[:80])!r} is not a name of this machine; ask for 127.0.0.1, or serve with a token",
        )


def _host_name(host: str) -> str:
    """Return a Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.rpartition(":")[0] if ":" in host else host


def is_loopback(host: str) -> bool:
    """Whether a name or an address stays on this machine."""
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def _refuse(send: Callable[[Message], Awaitable[None]], status: int, reason: str) -> None:
    headers = [(b"content-type", b"application/json"), (b"connection", b"close")]  # its body is not read
    if status == 401:
        headers.append((b"www-authenticate", b"Bearer"))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps({"error": reason}).encode()})


def _line(scope: Message, status: int, seconds: float) -> str:
    """Return a line of the access log."""
    state = scope.get("state", {})
    client = scope["client"][0] if scope.get("client") else "-"
    request = printable(f"{scope['method']} {scope['path']}"[:200])
    known = "".join(f" {key}={state[key]}" for key in ("rows", "version") if key in state)
    return f'{client} "{request}" {status} {1000 * seconds:.1f}ms{known}'
