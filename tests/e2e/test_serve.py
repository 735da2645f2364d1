"""examples/serve.py, as a user starts it, with requests from eight threads at once."""

import http.client
import json
import runpy
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers
from tests.conftest import ROOT

THREADS = 8
RNG = np.random.default_rng(0)
X = [RNG.random((rows, 784), np.float32) for rows in (1, 2, 1, 5, 1, 16, 1, 3)]


def build() -> dp.Sequential:
    model = dp.Sequential([layers.Input((784,)), layers.Dense(128, "relu"), layers.Dense(10, "softmax")], seed=4)
    model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
    return model


def asked(url: str, seconds: float, start: int) -> list[float]:
    """Ask for predictions over one connection, at least once for each of `X`; return how long each has taken.

    Raises:
        AssertionError: an answer is not the one of a single thread.
    """
    connection, took = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60), []
    bodies = [json.dumps({"x": x.tolist()}) for x in X]
    end = time.monotonic() + seconds
    while len(took) < len(X) or time.monotonic() < end:
        number = (start + len(took)) % len(X)
        begun = time.perf_counter()
        connection.request("POST", "/", bodies[number])
        response = connection.getresponse()
        answer = json.loads(response.read())
        took.append(time.perf_counter() - begun)
        assert response.status == 200, answer
        assert answer["y"] == EXPECTED[number], (
            f"another answer than that of a single thread, for {len(X[number])} rows"
        )
    connection.close()
    return took


EXPECTED: list[Any] = []


@pytest.fixture(params=["model.keras", "model.program"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Start the server of a model; note what a single thread gets."""
    model, path = build(), tmp_path / request.param
    if path.suffix == ".keras":
        model.save(path)
        EXPECTED[:] = [model.predict(x, verbose=0).tolist() for x in X]
    else:  # without a compiler, NumPy's products of other numbers of rows, as `predict` pads them, round otherwise
        model.export(path)
        EXPECTED[:] = [np.asarray(dp.saving.load_program(path)(x)).tolist() for x in X]
    command = [sys.executable, str(ROOT / "examples" / "serve.py"), str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        try:
            assert server.stdout is not None
            yield server.stdout.readline().strip()
        finally:
            server.kill()


def test_answers_to_threads(url: str):
    with ThreadPoolExecutor(THREADS) as pool:
        for future in [pool.submit(asked, url, 0.2, number) for number in range(THREADS)]:
            assert future.result(60)
    connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=60)
    for body, message in (('{"x": [[1, 2]]}', "784"), ("{", "Expecting"), ("{}", "x")):
        connection.request("POST", "/", body)
        response = connection.getresponse()
        assert response.status == 400
        assert message in json.loads(response.read())["error"]
    connection.close()


@pytest.fixture(scope="module")
def address() -> Iterator[tuple[str, int]]:
    """Serve a function that divides 1 by its input."""

    def inverse(x: Any) -> Any:
        with np.errstate(divide="ignore"):
            return np.float64(1) / x

    make_server = runpy.run_path(str(ROOT / "examples" / "serve.py"))["make_server"]
    with make_server(inverse) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_address
        finally:
            server.shutdown()
            thread.join()


def answered(address: tuple[str, int], request: bytes) -> list[tuple[int, Any]]:
    """Return the status and content of every response on a connection that gets these bytes and no more."""
    with socket.create_connection(address, timeout=60) as connection:
        connection.sendall(request)
        connection.shutdown(socket.SHUT_WR)
        received = b"".join(iter(lambda: connection.recv(65536), b""))
    responses = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        (length,) = [int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.startswith(b"Content-Length")]
        content, received = received[:length], received[length:]
        responses.append((int(head.split()[1]), json.loads(content, parse_constant=pytest.fail)))
    return responses


def post(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers or (f"Content-Length: {len(body)}",))
    return f"POST / HTTP/1.1\r\nHost: a\r\n{lines}\r\n".encode() + body


GOOD = post(b'{"x": [[2]]}')


def test_requests_follow_each_other(address):
    assert answered(address, GOOD + GOOD) == [(200, {"y": [[0.5]]})] * 2


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b'{"x": [[NaN]]}', 400, "not finite"),
        (b'{"x": [[-Infinity]]}', 400, "not finite"),
        (b'{"x": [[1e999]]}', 400, "not finite"),
        (b'{"x": [[0]]}', 500, "outputs are not finite"),
        (b"[" * 5000 + b"]" * 5000, 400, ""),
        (b'{"x": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400, ""),
        (b'{"x": ' + b"[" * 70 + b"]" * 70 + b"}", 400, ""),
        (b'{"x": [[1], [1, 2]]}', 400, ""),
        (b'{"x": ' + b"9" * 5000 + b"}", 400, "digits"),
        (b"[1]", 400, ""),
        (b"\xff\xfe\xfa", 400, ""),
        (b"", 400, "Expecting value"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_json_does_not_have_and_other_bodies(address, body, status, message):
    first, second = answered(address, post(body) + GOOD)
    assert (first[0], second) == (status, (200, {"y": [[0.5]]}))
    assert message in first[1]["error"]


@pytest.mark.parametrize(
    "headers",
    [
        ["Content-Length: -1"],
        ["Content-Length: 1000000000000000000000000000000"],
        ["Content-Length: 100000000"],
        ["Content-Length: twelve"],
        ["Content-Length: +12"],
        ["Content-Length: 1_2"],
        ["Content-Length: 12, 12"],
        ["Content-Length:"],
        ["Content-Length: 12", "Content-Length: 0"],
        ["Content-Length: 12", "Content-Length: 12"],
        ["Transfer-Encoding: chunked"],
        ["Content-Length: 12", "Transfer-Encoding: chunked"],
        ["X: none"],
    ],
    ids=str,
)
def test_the_rest_of_a_refused_body_is_no_request(address, headers):
    ((status, answer),) = answered(address, post(GOOD + GOOD, *headers))
    assert (status, "one Content-Length" in answer["error"]) == (400, True)
    assert answered(address, GOOD) == [(200, {"y": [[0.5]]})]  # the server goes on
