"""examples/serve.py, as a user starts it, with requests from eight threads at once."""

import http.client
import json
import subprocess
import sys
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
