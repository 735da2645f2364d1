"""The routes of a server: the Open Inference Protocol, /predict, /generate and /metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from dptrain.cli.server import inference_protocol as protocol
from dptrain.cli.server.batcher import Batcher, QueueFullError
from dptrain.cli.server.bodies import BodyTooLargeError, decompress
from dptrain.cli.server.generation import TokenEvents, read_generation
from dptrain.cli.server.metrics import Metrics
from dptrain.cli.server.samples import describe_outputs, read_samples
from dptrain.cli.server.served_model import ServedModel
from dptrain.cli.server.tensors import NotFiniteError
from dptrain.data.preprocessing import Unseen
from dptrain.errors import ConfigError, DataError, printable
from dptrain.runtime.failure import describe
from dptrain.runtime.text import one_line
from dptrain.version import __version__

Array = npt.NDArray[Any]
T = TypeVar("T")
Handler = Callable[["Service", Request], Awaitable[Response]]

# Bodies of fewer bytes are read between two requests, larger ones and pictures by a thread.
_LARGE = 1 << 15
_TOO_LONG, _BUSY, _NO_ANSWER = 408, 503, 504


@dataclass(frozen=True)
class Limits:
    """What a request may take."""

    body: int  # bytes
    rows: int
    seconds: float  # from its headers to its answer


class Service:
    """A model behind routes.

    Attributes:
        served: the model that new requests get; a request keeps the one that it began with.
        is_ready: whether new requests should come.
    """

    def __init__(
        self,
        served: ServedModel,
        batcher: Batcher,
        metrics: Metrics,
        limits: Limits,
        reader: Executor,
        unseen: Unseen | None = None,
    ) -> None:
        self.served, self.is_ready = served, True
        self._batcher, self._metrics, self._limits, self._reader = batcher, metrics, limits, reader
        self._unseen = unseen

    def routes(self) -> list[Route]:
        """Return all routes."""
        model = "/v2/models/{name}"
        of_model = [
            ("", "GET", _metadata, "metadata"),
            ("/ready", "GET", _model_ready, "ready"),
            ("/infer", "POST", _infer, "infer"),
        ]
        table = [
            ("/v2/health/live", "GET", _live, "live"),
            ("/v2/health/ready", "GET", _ready, "ready"),
            ("/v2", "GET", _server, "server"),
            ("/metrics", "GET", _metrics, "metrics"),
            ("/predict", "POST", _predict, "predict"),
            ("/generate", "POST", _generate, "generate"),
            *((f"{model}{end}", method, handler, name) for end, method, handler, name in of_model),
            *((f"{model}/versions/{{version}}{end}", method, handler, name) for end, method, handler, name in of_model),
        ]
        return [Route(path, self._answering(handler, name), methods=[method]) for path, method, handler, name in table]

    def _answering(self, handler: Handler, name: str) -> Callable[[Request], Awaitable[Response]]:
        """Return an endpoint whose errors are answers of one line."""

        @wraps(handler)
        async def endpoint(request: Request) -> Response:
            request.state.route = name
            try:
                return await handler(self, request)
            except (DataError, ConfigError, QueueFullError, HTTPException, ClientDisconnect) as error:
                return _failed(error)
            except Exception as error:  # of the model's own layers
                return _error(500, f"the model failed: {describe(error)}")

        return endpoint

    async def read_body(self, request: Request) -> bytes:
        """Return a request's body, unpacked; refuse one that is too large before it is read, or while it is."""
        most, claimed = self._limits.body, request.headers.get("content-length")
        too_large = BodyTooLargeError(f"body: more than {most:,} bytes; send fewer rows, or serve with --max-body-mb")
        if claimed is not None and int(claimed) > most:
            raise too_large
        chunks, size = [], 0
        async for chunk in request.stream():
            size += len(chunk)
            if size > most:
                raise too_large
            chunks.append(chunk)
        content = b"".join(chunks)
        encoding = request.headers.get("content-encoding", "").strip().lower()
        return content if not encoding else await self.in_reader(size, lambda: decompress(content, encoding, most))

    async def in_reader(self, size: int, action: Callable[[], Any]) -> Any:
        """Run what takes time in proportion to a body's size, where that is long on the reader's thread."""
        if size < _LARGE:
            return action()
        return await asyncio.get_running_loop().run_in_executor(self._reader, action)

    async def predict(
        self, request: Request, served: ServedModel, read: Callable[[bytes], Sequence[Array]]
    ) -> list[Array]:
        """Return the outputs for the arrays that `read` makes of a request's body, in time."""
        request.state.version = served.version
        during = _TOO_LONG
        try:
            async with asyncio.timeout(self._limits.seconds):
                content = await self.read_body(request)
                during = _NO_ANSWER
                is_slow = served.preprocessing is not None and served.preprocessing.kind == "pictures"
                arrays = await self.in_reader(_LARGE if is_slow else len(content), lambda: read(content))
                request.state.rows = len(arrays[0])
                return await self._batcher.predict(served, arrays)
        except TimeoutError:
            raise self._too_late(during) from None

    async def generate(self, request: Request) -> Response:
        """Return the tokens after a request's prompt, or a stream of them; the limit of time holds for each part."""
        served = self.served
        request.state.version = served.version
        wanted = read_generation(await self._in_time(_TOO_LONG, self.read_body(request)))
        end = self._batcher.begin_parts()
        ends_here = True
        try:
            tokens = await self._in_time(_NO_ANSWER, self._batcher.compute(lambda: wanted.tokens(served.model)))

            async def following() -> int | None:
                return await self._in_time(_NO_ANSWER, self._batcher.compute(lambda: next(tokens, None)))

            first = await following()
            if wanted.streams:
                ends_here = False
                return TokenEvents(wanted, first, following, end)
            answer, token = list[int](), first
            while token is not None:  # one by one, so that others' predictions are not held up
                answer.append(token)
                token = await following()
            return JSONResponse(wanted.answer(answer) | {"model_name": served.name, "model_version": served.version})
        finally:
            if ends_here:
                end()

    async def _in_time(self, status: int, action: Awaitable[T]) -> T:
        """Return what an action returns, or answer with a status when its time is over."""
        try:
            async with asyncio.timeout(self._limits.seconds):
                return await action
        except TimeoutError:
            raise self._too_late(status) from None

    def _too_late(self, status: int) -> HTTPException:
        what = "the body did not arrive" if status == _TOO_LONG else "busy: no answer"
        return HTTPException(status, f"{what} within {self._limits.seconds:g} s")

    def find(self, request: Request) -> ServedModel:
        """Return the model that a path names."""
        served, name = self.served, request.path_params["name"]
        version = request.path_params.get("version", served.version)
        if name != served.name:
            raise HTTPException(404, f"no model {printable(name[:80])!r}; this server has {served.name!r}")
        if version != served.version:
            raise HTTPException(404, f"no version {printable(version[:80])!r}; the model's is {served.version!r}")
        return served

    def metrics_text(self) -> bytes:
        """Return the metrics."""
        return self._metrics.text()

    @property
    def max_rows(self) -> int:
        """Rows of a request at most."""
        return self._limits.rows

    @property
    def unseen(self) -> Unseen | None:
        """What is done about categories that training has not seen."""
        return self._unseen


def make_app(service: Service) -> Starlette:
    """Return the ASGI application."""
    return Starlette(routes=service.routes(), exception_handlers={HTTPException: _not_found})


async def _live(service: Service, request: Request) -> Response:
    return Response()


async def _ready(service: Service, request: Request) -> Response:
    return Response(status_code=200 if service.is_ready else _BUSY)


async def _model_ready(service: Service, request: Request) -> Response:
    service.find(request)
    return await _ready(service, request)


async def _server(service: Service, request: Request) -> Response:
    return JSONResponse({"name": "dptrain", "version": __version__, "extensions": protocol.EXTENSIONS})


async def _metadata(service: Service, request: Request) -> Response:
    return JSONResponse(service.find(request).metadata())


async def _metrics(service: Service, request: Request) -> Response:
    return Response(service.metrics_text(), media_type=Metrics.content_type)


async def _infer(service: Service, request: Request) -> Response:
    served = service.find(request)
    names = [spec.name for spec in served.outputs]
    asked: list[protocol.InferenceRequest] = []

    def read(content: bytes) -> Sequence[Array]:
        length = request.headers.get(protocol.JSON_LENGTH)
        asked.append(protocol.read_request(content, length, served.inputs, names, service.max_rows))
        return asked[0].arrays

    outputs = await service.predict(request, served, read)

    def write() -> tuple[bytes, int | None]:
        named = dict(zip(names, outputs, strict=True))
        return protocol.answer(asked[0], served.name, served.version, named)

    body, json_length = await service.in_reader(_bytes_of(outputs), write)
    if json_length is None:
        return Response(body, media_type="application/json")
    headers = {protocol.JSON_LENGTH: str(json_length)}
    return Response(body, media_type="application/octet-stream", headers=headers)


async def _predict(service: Service, request: Request) -> Response:
    served = service.served
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    outputs = await service.predict(
        request, served, lambda body: read_samples(body, content_type, served, service.unseen, service.max_rows)
    )

    def write() -> Response:
        rows = describe_outputs(served, outputs)
        return JSONResponse({"predictions": rows, "model_name": served.name, "model_version": served.version})

    response: Response = await service.in_reader(_bytes_of(outputs), write)
    return response


async def _generate(service: Service, request: Request) -> Response:
    return await service.generate(request)


def _bytes_of(arrays: Sequence[Array]) -> int:
    return int(np.sum([array.nbytes for array in arrays]))


def _failed(error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _error(error.status_code, error.detail)
    if isinstance(error, ClientDisconnect):
        return _error(400, "the client has gone")
    status = (
        413
        if isinstance(error, BodyTooLargeError)
        else _BUSY
        if isinstance(error, QueueFullError)
        else 500
        if isinstance(error, NotFiniteError)
        else 400
    )
    return _error(status, str(error))


def _error(status: int, text: str) -> Response:
    headers = {"Retry-After": "1"} if status == _BUSY else {}
    if status in (408, 413):
        headers["Connection"] = "close"  # or the rest of the body would be the next request
    return JSONResponse({"error": one_line(text)}, status, headers=headers)


async def _not_found(request: Request, error: Exception) -> Response:
    """Answer what no route takes."""
    assert isinstance(error, HTTPException)
    path = printable(request.url.path[:80])
    known = "the routes are /v2/..., /predict, /generate and /metrics"
    detail = f"{request.method} {path}: {known}" if error.status_code == 404 else f"{path} takes no {request.method}"
    response = _error(error.status_code, detail)
    response.headers.update(error.headers or {})
    return response
