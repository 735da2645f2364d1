"""Runs the server: sockets, the model's reload, signals, and an end that loses no request."""

import asyncio
import contextlib
import json
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from dptrain.cli.server.app import Limits, Service, make_app
from dptrain.cli.server.batcher import Batcher
from dptrain.cli.server.guard import Guard
from dptrain.cli.server.log import Log
from dptrain.cli.server.metrics import Metrics
from dptrain.cli.server.served_model import ServedModel, load_served_model, signature_of
from dptrain.data.preprocessing import Unseen
from dptrain.errors import ConfigError, OutputError
from dptrain.models import Model
from dptrain.runtime.failure import describe

_HEADER_SECONDS = 10.0  # in which a client has sent a request's headers, and between two requests
_RELOAD_SECONDS = 1.0  # between two looks at the model's file
_BACKLOG = 1024


@dataclass(frozen=True)
class Settings:
    """What the command line says.

    Attributes:
        host, port: where to listen; port 0 takes one that is free.
        token: what requests must bring, or None.
        max_batch: rows of a joined prediction.
        wait: seconds that a request waits for others to join it.
        queue: requests that may wait.
        limits: of a request.
        access_log: whether to write a line for each request.
        unseen: what is done about categories that training has not seen; None as in training.
    """

    host: str
    port: int
    token: str | None
    max_batch: int
    wait: float
    queue: int
    limits: Limits
    access_log: bool
    unseen: Unseen | None


class _Protocol(H11Protocol):
    """uvicorn's protocol, with an end for clients that send their headers slowly or not at all."""

    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._set_patience()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._set_patience()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP, and close."""
        text = json.dumps({"error": f"{msg.rstrip('.')}: not HTTP/1.1, or an unclear length of its body"}).encode()
        headers = [("Content-Type", "application/json"), ("Content-Length", str(len(text))), ("Connection", "close")]
        for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=text), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event) or b"")
        self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _set_patience(self) -> None:
        if self.conn.their_state is not h11.IDLE:  # the headers are there
            self._forget()
        elif self._patience is None:
            self._patience = self.loop.call_later(_HEADER_SECONDS, self.transport.abort)

    def _forget(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class _Server(uvicorn.Server):
    """uvicorn's server, which leaves signals to `serve`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class ModelServer:
    """Serves a model's file until a signal.

    Args:
        path: of the model's file.
        name: of the model, in requests and answers.
        load: returns the model in the file.
    """

    def __init__(self, path: Path, name: str, load: Callable[[], Model], settings: Settings) -> None:
        self._path, self._name, self._load, self._settings = path, name, load, settings
        self._predictor = ThreadPoolExecutor(1, "predictor")
        self._reader = ThreadPoolExecutor(1, "reader")
        self._loader = ThreadPoolExecutor(1, "loader")
        self._changed = asyncio.Event()
        self._log = Log()

    def run(self, announce: Callable[[str, ServedModel], None]) -> None:
        """Serve until SIGTERM or SIGINT; `announce` gets the address and the model once requests are taken."""
        listener = bind(self._settings.host, self._settings.port)
        try:
            asyncio.run(self._serve(listener, announce))
        finally:
            listener.close()
            self._log.close()
            for executor in (self._predictor, self._reader, self._loader):
                executor.shutdown()

    async def _serve(self, listener: socket.socket, announce: Callable[[str, ServedModel], None]) -> None:
        settings, signature, loop = self._settings, signature_of(self._path), asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGHUP, self._changed.set)
        served = await loop.run_in_executor(self._predictor, self._loaded)
        batcher = Batcher(
            self._predictor,
            max_rows=settings.max_batch,
            wait=settings.wait,
            queue=settings.queue,
            observe=lambda requests, rows: metrics.add_batch(requests, rows),
        )
        metrics = Metrics(lambda: len(batcher))
        metrics.set_model(served.name, served.version)
        service = Service(served, batcher, metrics, settings.limits, self._reader, settings.unseen)
        app = Guard(
            make_app(service),
            metrics,
            token=settings.token,
            log=self._log if settings.access_log else None,
            timeout=settings.limits.seconds,
        )
        config = uvicorn.Config(
            app,
            http=_Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=int(_HEADER_SECONDS),
            timeout_graceful_shutdown=int(settings.limits.seconds) + 1,
        )
        server = _Server(config)
        self._listen_to_signals(server, service)
        tasks = [asyncio.create_task(batcher.run()), asyncio.create_task(self._reload(service, metrics, signature))]
        try:
            announce(address_of(listener), served)
            await server.serve([listener])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def _loaded(self) -> ServedModel:
        return load_served_model(self._path, self._name, self._load)

    def _listen_to_signals(self, server: uvicorn.Server, service: Service) -> None:
        loop = asyncio.get_running_loop()

        def stop() -> None:
            """Take no more requests, and end when those that are here are answered; at the second signal at once."""
            server.force_exit = server.should_exit
            service.is_ready, server.should_exit = False, True

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, stop)

    async def _reload(self, service: Service, metrics: Metrics, signature: tuple[int, ...] | None) -> None:
        """Load the model anew when its file changes or at SIGHUP; requests go on with the old one meanwhile."""
        loop = asyncio.get_running_loop()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), _RELOAD_SECONDS)
            present = await asyncio.to_thread(signature_of, self._path)
            if not self._changed.is_set() and present in (signature, None):
                continue
            self._changed.clear()
            signature = present
            # A GPU belongs to one thread; on a CPU the next model is loaded while the present one predicts.
            thread = self._loader if service.served.is_on_cpu else self._predictor
            try:
                served = await loop.run_in_executor(thread, self._loaded)
            except Exception as error:  # a damaged file: the old model stays
                metrics.reloads.labels("failed").inc()
                self._log.add(f"not reloaded, version {service.served.version} goes on: {describe(error)}")
                continue
            metrics.reloads.labels("loaded").inc()
            metrics.set_model(served.name, served.version)
            if served.version != service.served.version:
                self._log.add(f"version {served.version} of {served.name} instead of {service.served.version}")
            service.served = served


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; ConfigError of a host that is none, OutputError of a port that is taken."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"--host {host}: {getattr(error, 'strerror', None) or error}") from None
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except OSError as error:
        listener.close()
        raise OutputError(
            f"cannot listen on {host}, port {port}: {error.strerror or error}; choose another --port"
        ) from None
    return listener


def address_of(listener: socket.socket) -> str:
    """Return a listener's URL."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
