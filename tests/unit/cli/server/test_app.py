"""The application without a network: limits of time, tokens, hosts, a full queue, what is counted and logged."""

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers

pytest.importorskip("starlette")
pytest.importorskip("prometheus_client")

from dptrain.cli.server.app import Limits, Service, make_app
from dptrain.cli.server.batcher import Batcher
from dptrain.cli.server.guard import Guard, is_loopback
from dptrain.cli.server.metrics import Metrics
from dptrain.cli.server.served_model import describe


@pytest.fixture(scope="module")
def served():
    return describe(dp.Sequential([layers.Input((2,)), layers.Dense(1)]), "name", "1")


class Lines(list):
    """Stands for the log."""

    add = list.append


def exchange(served, requests, *, seconds=60.0, queue=9, predicts=True, token=None, log=None, reads=True):
    """Return (status, headers, content) of each request, sent at once; a body of None does not arrive."""

    async def ask_all():
        with ThreadPoolExecutor(1) as executor:
            metrics = Metrics(lambda: 0)
            batcher = Batcher(executor, max_rows=8, wait=0, queue=queue, observe=metrics.add_batch)
            runs = asyncio.create_task(batcher.run()) if predicts else None
            limits = Limits(body=1000, rows=4, seconds=seconds)
            service = Service(served, batcher, metrics, limits, executor)
            app = Guard(make_app(service), metrics, token=token, log=log, timeout=seconds)
            results = await asyncio.gather(*(ask(app, *request) for request in requests))
            if runs is not None:
                runs.cancel()
            return results

    async def ask(app, method, path, body, headers=None):
        sent = []
        messages = [] if body is None else [{"type": "http.request", "body": body, "more_body": False}]

        async def receive():
            if messages:
                return messages.pop()
            await asyncio.Event().wait()

        async def send(message):
            if not reads:
                await asyncio.Event().wait()
            sent.append(message)

        names = {"host": "localhost", **(headers or {})}
        scope = {
            "type": "http",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "headers": [(name.encode(), value.encode()) for name, value in names.items()],
            "client": ("127.0.0.1", 5),
            "state": {},
        }
        await app(scope, receive, send)
        if not sent:
            return None, {}, b""
        fields = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return sent[0]["status"], fields, b"".join(message.get("body", b"") for message in sent[1:])

    return asyncio.run(ask_all())


GOOD = ("POST", "/predict", b"[[1, 2]]")


def test_a_body_that_does_not_arrive(served):
    ((status, headers, content),) = exchange(served, [("POST", "/predict", None)], seconds=0.05)
    assert (status, headers["connection"]) == (408, "close")
    assert json.loads(content) == {"error": "the body did not arrive within 0.05 s"}


def test_an_answer_that_does_not_come(served):
    ((status, _, content),) = exchange(served, [GOOD], seconds=0.05, predicts=False)
    assert (status, json.loads(content)) == (504, {"error": "busy: no answer within 0.05 s"})


def test_a_full_queue(served):
    log = Lines()
    (first, second) = exchange(served, [GOOD, GOOD], seconds=0.5, queue=1, predicts=False, log=log)
    assert (first[0], second[0], second[1]["retry-after"]) == (504, 503, "1")
    assert sorted(line.split()[3] for line in log) == ["503", "504"]


def test_a_client_that_does_not_read(served):
    log = Lines()
    ((status, _, _),) = exchange(served, [GOOD], seconds=0.2, reads=False, log=log)
    assert status is None
    assert ' "POST /predict" 499 ' in log[0]


def test_a_body_that_is_too_large(served):
    for body, headers in ((b" " * 1001, {}), (None, {"content-length": "1001"})):
        ((status, fields, content),) = exchange(served, [("POST", "/predict", body, headers)])
        assert (status, fields["connection"]) == (413, "close")
        assert "more than 1,000 bytes" in json.loads(content)["error"]


def test_what_unpacks_to_too_much(served):
    import gzip

    for body, encoding, status in (
        (gzip.compress(b" " * 100_000), "gzip", 413),
        (gzip.compress(b"[[1, 2]]"), "gzip", 200),
        (gzip.compress(b"[[1, 2]]")[:-1], "gzip", 400),
        (b"[[1, 2]]", "gzip", 400),
        (b"[[1, 2]]", "br", 400),
    ):
        ((found, _, _),) = exchange(served, [("POST", "/predict", body, {"content-encoding": encoding})])
        assert found == status


def test_routes_that_there_are_not(served):
    for method, path, status in (
        ("GET", "/predict", 405),
        ("POST", "/v2/health/live", 405),
        ("GET", "/\x1b[2J", 404),
        ("GET", "/v2/models/other", 404),
        ("GET", "/v2/models/name/versions/2", 404),
        ("GET", "/v2/models/name/versions/1", 200),
        ("GET", "/v2/models/name/versions/1/ready", 200),
    ):
        ((found, _, content),) = exchange(served, [(method, path, b"")])
        assert found == status
        assert b"\x1b" not in content


def test_who_may_ask(served):
    token = "0123456789abcdef"
    for host, status in (
        ("localhost:8000", 200),
        ("127.0.0.1", 200),
        ("[::1]:8000", 200),
        ("evil.example", 421),
        ("localhost.evil.example", 421),
        ("", 421),
    ):
        ((found, _, _),) = exchange(served, [("GET", "/v2", b"", {"host": host})])
        assert found == status, host
    for given, status in ((None, 401), ("Bearer x", 401), (token, 401), (f"Bearer {token}", 200)):
        headers = {"host": "model.example"} | ({} if given is None else {"authorization": given})
        requests = [
            ("GET", "/v2", b"", headers),
            ("GET", "/v2/health/ready", b"", headers),
            ("GET", "/metrics", b"", headers),
        ]
        results = exchange(served, requests, token=token)
        assert [found for found, _, _ in results] == [status, 200, status]


def test_names_of_this_machine():
    assert [name for name in ("localhost", "a.localhost", "127.1.2.3", "::1", "0.0.0.0", "::", "10.0.0.1", "a.b", "")
            if is_loopback(name)] == ["localhost", "a.localhost", "127.1.2.3", "::1"]  # fmt: skip


def test_what_is_logged_and_counted(served):
    log = Lines()
    results = exchange(
        served, [GOOD, ("POST", "/predict", b"["), ("GET", "/a\nb", b""), ("GET", "/metrics", b"")], log=log
    )
    assert [status for status, _, _ in results] == [200, 400, 404, 200]
    assert any(line.startswith('127.0.0.1 "POST /predict" 200 ') and line.endswith(" rows=1 version=1") for line in log)
    assert all("\n" not in line for line in log)
    answer = json.loads(results[0][2])
    expected = served.model.predict(np.float32([[1, 2]]), verbose=0)
    assert np.float32(answer["predictions"][0]["output"]) == expected[0, 0]
    assert (answer["model_name"], answer["model_version"]) == ("name", "1")
    assert b"# TYPE dptrain_request_seconds histogram" in results[3][2]
