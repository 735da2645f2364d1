"""`python -m dptrain serve`, as a user starts it: asked by the real client, by many at once, and by hostile ones."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain.cli.main import main
from tests.conftest import ROOT

pytest.importorskip("uvicorn")
pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

CLIENTS = 16
RNG = np.random.default_rng(0)
TOWNS = ["Bergen", "Oslo", "Voss"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a classifier of a table's rows."""
    pandas = pytest.importorskip("pandas")
    folder = tmp_path_factory.mktemp("serve")
    rooms = RNG.normal(size=90).round(3)
    towns = RNG.choice(TOWNS, 90)
    kind = np.where(rooms > 0.5, "villa", np.where(towns == "Oslo", "flat", "cabin"))
    table = pandas.DataFrame({"rooms": rooms, "town": towns, "kind": kind})
    table.to_csv(folder / "houses.csv", index=False)
    arguments = ["--data", str(folder / "houses.csv"), "--target", "kind", "--epochs", "1", "--verbose", "0"]
    assert main([*arguments, "--jit-compile", "on", "--out", str(folder / "houses")]) == 0
    return folder / "houses"


@contextmanager
def serving(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], tuple[str, int]]]:
    """Start a server; yield its process and address, and end it."""
    command = [sys.executable, "-m", "dptrain", "serve", str(run), "--port", "0", "--jit-compile", "on", *options]
    environment = {name: value for name, value in os.environ.items() if name != "DPTRAIN_JIT_COMPILE"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.match(r"http://([\d.]+):(\d+) serves", line)
            assert found, line + process.communicate()[1]
            yield process, (found[1], int(found[2]))
        finally:
            process.kill()


@pytest.fixture(scope="module")
def address(run: Path) -> Iterator[tuple[str, int]]:
    """The address of the server that most tests share."""
    with serving(run, "--batch-wait", "5", "--max-rows", "64", "--access-log", "off") as (_, address):
        yield address


def post(address: tuple[str, int], path: str, body: Any, **headers: str) -> tuple[int, Any]:
    """Return status and content of an answer, which is JSON."""
    connection = HTTPConnection(*address, timeout=120)
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    try:
        connection.request("POST", path, content, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, json.loads(response.read(), parse_constant=pytest.fail)
    finally:
        connection.close()


def get(address: tuple[str, int], path: str) -> bytes:
    connection = HTTPConnection(*address, timeout=120)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        assert response.status == 200
        return response.read()
    finally:
        connection.close()


RECORDS = [{"rooms": float(rooms), "town": TOWNS[row % 3]} for row, rooms in enumerate(RNG.normal(size=40).round(3))]


def test_all_calls_of_the_real_client(run, address):
    http = pytest.importorskip("tritonclient.http", exc_type=ImportError)
    client = http.InferenceServerClient("{}:{}".format(*address), concurrency=1, network_timeout=120.0)
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("houses")
    assert not client.is_model_ready("castles")
    assert client.get_server_metadata()["extensions"] == ["binary_tensor_data"]
    metadata = client.get_model_metadata("houses")
    (given,), (taken,) = metadata["inputs"], metadata["outputs"]
    assert (given["datatype"], given["shape"]) == ("FP32", [-1, 4])
    assert (taken["datatype"], taken["shape"]) == ("FP32", [-1, 3])
    model = dp.models.load_model(run, jit_compile=True)
    x = model.preprocessing.encode(RECORDS[:5])
    expected = model.predict(x, verbose=0)
    (version,) = metadata["versions"]
    for sent_binary, got_binary, compression, asked in [
        (True, True, None, ""),
        (True, False, "gzip", version),
        (False, True, "deflate", ""),
        (False, False, None, version),
    ]:
        tensor = http.InferInput(given["name"], list(x.shape), "FP32")
        tensor.set_data_from_numpy(x, binary_data=sent_binary)
        wanted = [http.InferRequestedOutput(taken["name"], binary_data=got_binary)]
        result = client.infer(
            *("houses", [tensor], asked, wanted), request_id="7", request_compression_algorithm=compression
        )
        np.testing.assert_array_equal(result.as_numpy(taken["name"]), expected)
        assert (result.get_response()["id"], result.get_response()["model_version"]) == ("7", version)
    everything = client.infer("houses", [tensor])  # without a list of outputs all come, as bytes
    np.testing.assert_array_equal(everything.as_numpy(taken["name"]), expected)
    for name, asked, message in (("castles", "", "this server has 'houses'"), ("houses", "1", "no version '1'")):
        with pytest.raises(http.InferenceServerException, match=message):
            client.infer(name, [tensor], asked)
    client.close()


def test_people_get_classes_and_probabilities(run, address):
    status, answer = post(address, "/predict", RECORDS)
    assert status == 200
    model = dp.models.load_model(run, jit_compile=True)
    expected = model.predict(RECORDS, verbose=0)
    names = model.preprocessing.class_names
    for row, prediction in zip(expected, answer["predictions"], strict=True):
        assert prediction["class"] == names[int(row.argmax())]
        assert [*prediction["probabilities"]] == [*names]
        np.testing.assert_array_equal(np.float32([*prediction["probabilities"].values()]), row)
    assert post(address, "/predict", RECORDS[0]) == post(address, "/predict", {"instances": RECORDS[:1]})


def test_requests_that_are_joined_get_the_bits_of_each_alone(run, address):
    model = dp.models.load_model(run, jit_compile=True)
    x = model.preprocessing.encode(RECORDS)
    alone = [model.predict(x[row : row + 1], verbose=0)[0] for row in range(len(x))]

    def ask(first: int) -> None:
        connection = HTTPConnection(*address, timeout=120)
        for row in range(first, len(RECORDS), CLIENTS):
            connection.request("POST", "/predict", json.dumps([RECORDS[row]]))
            (prediction,) = json.loads(connection.getresponse().read())["predictions"]
            np.testing.assert_array_equal(np.float32([*prediction["probabilities"].values()]), alone[row])
        connection.close()

    before = predictions(address)
    with ThreadPoolExecutor(CLIENTS) as pool:
        for future in [pool.submit(ask, first) for first in range(CLIENTS)]:
            future.result(120)
    requests, batches = (after - earlier for after, earlier in zip(predictions(address), before, strict=True))
    assert requests == len(RECORDS)
    assert batches < requests


def predictions(address: tuple[str, int]) -> tuple[float, float]:
    """Return how many requests have been predicted, in how many batches."""
    lines = dict(line.rsplit(" ", 1) for line in get(address, "/metrics").decode().splitlines() if line[0] != "#")
    return float(lines["dptrain_batch_requests_sum"]), float(lines["dptrain_batch_requests_count"])


def infer(**changes: Any) -> bytes:
    """Return the body of an inference with an input that is changed."""
    tensor = {"name": "input_layer", "shape": [1, 4], "datatype": "FP32", "data": [1, 0, 1, 0]} | changes
    return json.dumps({"inputs": [tensor]}).encode()


INFER = "/v2/models/houses/infer"


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/predict", b"[" * 5000 + b"]" * 5000, "nested too deeply|not JSON|expected a record"),
        ("/predict", b'[{"rooms": ' + b"[" * 5000 + b"]" * 5000 + b"}]", "nested|expected"),
        ("/predict", b'[{"rooms": NaN, "town": "Oslo"}]', "NaN is no number of JSON"),
        ("/predict", b'[{"rooms": 1e999, "town": "Oslo"}]', "infinite"),
        ("/predict", b'[{"rooms": ' + b"9" * 5000 + b', "town": "Oslo"}]', "digits"),
        ("/predict", b'[{"rooms": ' + b"9" * 400 + b', "town": "Oslo"}]', "correct it"),
        ("/predict", b'[{"rooms": [1], "town": "Oslo"}]', "column 'rooms'.*expected a number"),
        ("/predict", b'[{"rooms": 1, "town": "Paris"}]', "'Paris', which training has not seen"),
        ("/predict", b'[{"rooms": null, "town": "Oslo"}]', "column 'rooms': no value"),
        ("/predict", b'[{"room": 1, "town": "Oslo"}]', "no column 'rooms'; did you mean 'room'"),
        ("/predict", b"[1]", "expected a record"),
        ("/predict", b"[]", "empty list"),
        ("/predict", b"", "not JSON"),
        ("/predict", b"\xff\xfe\xfa", "not UTF-8"),
        ("/predict", json.dumps(RECORDS * 2).encode(), "80 rows, a request has at most 64"),
        (INFER, infer(shape=[1 << 40, 4]), "1,099,511,627,776 rows"),
        (INFER, infer(shape=[1 << 62, 1 << 62]), "expected .-1, 4"),
        (INFER, infer(shape=[-1, 4]), "lengths of 1 or more"),
        (INFER, infer(shape=[True, 4]), "lengths of 1 or more"),
        (INFER, infer(shape="1"), "expected a list"),
        (INFER, infer(shape=[1, 3]), "expected .-1, 4"),
        (INFER, infer(shape=[2, 4]), "4 values"),
        (INFER, infer(data=[[1, 0], [1, 0]]), "not nested like its shape"),
        (INFER, infer(datatype="INT64"), "datatype INT64, expected FP32"),
        (INFER, infer(datatype="FP128"), "expected one of BOOL"),
        (INFER, infer(datatype=None), "datatype None"),
        (INFER, infer(data=[1, 0, 1, "0"]), "data holds '0'"),
        (INFER, infer(data=[1, 0, 1, None]), "data holds None"),
        (INFER, infer(data=[1, 0, 1, 1e39]), "too large for FP32"),
        (INFER, infer(name="input_lair"), "did you mean 'input_layer'"),
        (INFER, infer(parameters={"binary_data_size": 1 << 40}), "0 bytes are left"),
        (INFER, infer(parameters={"shared_memory_region": "x"}), "shared memory is not supported"),
        (INFER, infer(parameters=[]), "expected an object"),
        (INFER, b'{"inputs": []}', "is missing"),
        (INFER, b"{}", 'an object with "inputs"'),
        (INFER, infer() + b"behind", "not JSON"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_a_hostile_body_gets_one_line(address, path, body, message):
    status, answer = post(address, path, body)
    assert (status, [*answer]) == (400, ["error"])
    assert re.search(message, answer["error"])
    assert "\n" not in answer["error"]
    assert post(address, "/predict", RECORDS[:1])[0] == 200


def test_nan_is_never_in_json(address):
    x = np.full((1, 4), np.nan, np.float32)
    head = json.dumps(
        {
            "inputs": [
                {"name": "input_layer", "shape": [1, 4], "datatype": "FP32", "parameters": {"binary_data_size": 16}}
            ]
        }
    ).encode()
    body = head + x.tobytes()
    status, answer = post(address, INFER, body, Inference_Header_Content_Length=str(len(head)))
    assert status == 500
    assert "NaN or infinite, which JSON does not have" in answer["error"]
    for length in ("-1", str(len(body) + 1), "1e3", "9" * 30):
        status, answer = post(address, INFER, body, Inference_Header_Content_Length=length)
        assert (status, [*answer]) == (400, ["error"])


def raw(address: tuple[str, int], request: bytes) -> list[tuple[int, bytes]]:
    """Return the status and content of each response on a connection that the server closes."""
    with socket.create_connection(address, timeout=120) as connection:
        with suppress(OSError):  # the server may close before it has read all
            connection.sendall(request)
        received = b""
        with suppress(ConnectionResetError):
            while part := connection.recv(65536):
                received += part
    responses = []
    while received:
        head, _, received = received.partition(b"\r\n\r\n")
        length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])
        responses.append((int(head.split()[1]), received[:length]))
        received = received[length:]
    return responses


def request(body: bytes, *headers: str) -> bytes:
    lines = "".join(f"{line}\r\n" for line in headers or (f"Content-Length: {len(body)}",))
    return f"POST /predict HTTP/1.1\r\nHost: 127.0.0.1\r\n{lines}\r\n".encode() + body


ONE = json.dumps(RECORDS[:1]).encode()
GOOD, LAST = request(ONE), request(ONE, f"Content-Length: {len(ONE)}", "Connection: close")


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        (["Content-Length: -1"], 400),
        (["Content-Length: 1000000000000000000000000000000"], 400),
        (["Content-Length: 100000000000000000"], 413),
        (["Content-Length: 16000001"], 413),
        (["Content-Length: twelve"], 400),
        (["Content-Length: +12"], 400),
        (["Content-Length: 1_2"], 400),
        (["Content-Length: 12", "Content-Length: 0"], 400),
        (["Transfer-Encoding: gzip"], 400),
        (["Transfer-Encoding: chunked"], 400),
        (["Transfer-Encoding: chunked", "Content-Length: 12"], 400),
    ],
    ids=lambda value: str(value)[:40],
)
def test_the_rest_of_a_refused_body_is_no_request(address, headers, expected):
    responses = raw(address, request(GOOD + GOOD, *headers))
    ((status, content),) = responses
    assert status == expected
    assert [*json.loads(content)] == ["error"]
    assert [status for status, _ in raw(address, GOOD + LAST)] == [200, 200]


def test_a_page_of_another_name_does_not_reach_a_server_of_this_machine(address):
    status, answer = post(address, "/predict", RECORDS[:1], Host="evil.example")
    assert status == 421
    assert "evil.example" in answer["error"]


def test_slow_clients_keep_nobody_waiting(address):
    slow = []
    try:
        for length in range(0, 60):
            slow.append(socket.create_connection(address, timeout=120))
            slow[-1].sendall(request(b"[", "Content-Length: 10000")[: 5 + 2 * length])
        assert post(address, "/predict", RECORDS[:1])[0] == 200
    finally:
        for connection in slow:
            connection.close()


def replaced(run: Path, seed: int) -> dict[str, Any]:
    """Replace a run's model by one with other weights; return its answer to the first record."""
    model = dp.models.load_model(run, jit_compile=True)
    generator = np.random.default_rng(seed)
    model.set_weights([weight + generator.random(weight.shape) for weight in model.get_weights()])
    model.save(run / "next.keras")
    os.replace(run / "next.keras", run / "model.keras")
    return dict(zip(model.preprocessing.class_names, model.predict(RECORDS[:1], verbose=0)[0].tolist(), strict=True))


@pytest.mark.slow
def test_reload_and_stop_lose_no_request(run, tmp_path):
    """Clients ask on while the model is replaced twice and the server is told to end; each answer is of one version."""
    token = tmp_path / "token"
    token.write_text("0123456789abcdef\n")
    model = dp.models.load_model(run, jit_compile=True)
    expected = [
        dict(zip(model.preprocessing.class_names, model.predict(RECORDS[:1], verbose=0)[0].tolist(), strict=True))
    ]
    with serving(run, "--token-file", str(token), "--host", "0.0.0.0") as (process, (_, port)):
        address = ("127.0.0.1", port)
        assert post(address, "/predict", RECORDS[:1])[0] == 401
        assert post(address, "/predict", RECORDS[:1], Authorization="Bearer 0123456789abcdeg")[0] == 401
        versions: list[str] = []
        answers: list[tuple[str, Any]] = []
        ends, loaded = threading.Event(), threading.Condition()

        def ask() -> None:
            headers = {"Authorization": "Bearer 0123456789abcdef"}
            while not ends.is_set():
                status, answer = post(address, "/predict", RECORDS[:1], **headers)
                assert status == 200, answer
                with loaded:
                    answers.append((answer["model_version"], answer["predictions"][0]["probabilities"]))
                    if answer["model_version"] not in versions:
                        versions.append(answer["model_version"])
                        loaded.notify()

        with ThreadPoolExecutor(4) as pool:
            futures = [pool.submit(ask) for _ in range(4)]
            try:
                for seed in (1, 2):
                    expected.append(replaced(run, seed))
                    if seed == 2:
                        process.send_signal(signal.SIGHUP)
                    with loaded:
                        assert loaded.wait_for(lambda: len(versions) == len(expected), 120)
            finally:
                ends.set()
            for future in futures:
                future.result(120)
        for version, probabilities in answers:
            assert {name: np.float32(value) for name, value in probabilities.items()} == {
                name: np.float32(value) for name, value in expected[versions.index(version)].items()
            }
        (run / "model.keras").write_bytes(b"damaged")
        assert process.stderr is not None
        for line in process.stderr:
            if "not reloaded" in line:
                break
        assert post(address, "/predict", RECORDS[:1], Authorization="Bearer 0123456789abcdef")[0] == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
