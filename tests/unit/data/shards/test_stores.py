"""Shards in an object store: an S3 server on this machine behind a proxy that is slow, busy, cuts connections."""

import http.client
import http.server
import os
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches import sharded_dataset
from dptrain.data.shards.stores import Store, expand, is_pattern
from dptrain.errors import ConfigError, DataError
from tests.unit.data.shards.shard_files import windows, write_parquet, write_tar, write_tokens


class Proxy(http.server.ThreadingHTTPServer):
    """Forwards requests to a server; `fault` may answer for it, by the handler, the path and how often it was asked."""

    daemon_threads = True

    def __init__(self, target: tuple[str, int]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.target = target
        self.fault: Callable[[Handler, str, int], bool] | None = None
        self.asked: Counter[str] = Counter()
        self.bytes_sent = 0
        self.lock = threading.Lock()
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request, client_address) -> None:
        """Say nothing: connections are cut on purpose."""


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def forward(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        name = self.path.partition("?")[0]
        with self.server.lock:
            if self.command == "GET":
                self.server.asked[name] += 1
            asked = self.server.asked[name]
        if self.server.fault is not None and self.server.fault(self, name, asked):
            return
        status, headers, content = self.answer(body)
        self.reply(status, headers, content)

    def answer(self, body: bytes = b"") -> tuple[int, list[tuple[str, str]], bytes]:
        connection = http.client.HTTPConnection(*self.server.target, timeout=30)
        connection.request(self.command, self.path, body, dict(self.headers))
        response = connection.getresponse()
        content = response.read()
        connection.close()
        return response.status, response.getheaders(), content

    def reply(self, status: int, headers: list[tuple[str, str]], content: bytes, cut: int | None = None) -> None:
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = dict(headers).get("Content-Length", str(len(content))) if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content[:cut])
            self.server.bytes_sent += len(content[:cut])
        if cut is not None:
            self.wfile.flush()
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, *_) -> None:
        """Say nothing."""

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = forward  # noqa: N815


def busy(times: int) -> Callable[[Handler, str, int], bool]:
    """Return a fault: objects are answered with 503 so many times."""

    def fault(handler: Handler, name: str, asked: int) -> bool:
        if handler.command != "GET" or "." not in name or asked > times:
            return False
        handler.reply(503, [("Content-Type", "application/xml")], b"<Error><Code>SlowDown</Code></Error>")
        return True

    return fault


def cutting(handler: Handler, name: str, asked: int) -> bool:
    """A fault: the first answer of each object ends in the middle."""
    if handler.command != "GET" or "." not in name or asked > 1:
        return False
    status, headers, content = handler.answer()
    handler.reply(status, headers, content, len(content) // 2)
    return True


def slow(handler: Handler, name: str, asked: int) -> bool:
    """A fault: each answer is late."""
    time.sleep(0.05)
    return False


@pytest.fixture(scope="module")
def server():
    """The address of an S3 server of this machine, in a process of its own."""
    pytest.importorskip("moto", reason="an S3 server for tests needs moto[server]")
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-W", "ignore", "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    # The server needs libraries that tests of dptrain do without, by modules on that path.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        for _ in range(600):
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "moto's server does not start"
            time.sleep(0.1)
        else:
            pytest.fail("moto's server does not answer within a minute")
        yield "127.0.0.1", port
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def proxy(server, monkeypatch, tmp_path):
    import fsspec

    proxy = Proxy(server)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_MAX_ATTEMPTS": "1",
        "DPTRAIN_CACHE": str(tmp_path / "cache"),
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sharded_dataset, "FIRST_WAIT", 0.01)
    monkeypatch.setattr(fsspec.get_filesystem_class("s3"), "retries", 1)  # its own, beside ours
    for system in (fsspec.get_filesystem_class("s3"), fsspec.get_filesystem_class("http")):
        system.clear_instance_cache()
    yield proxy
    proxy.shutdown()
    proxy.server_close()


@pytest.fixture
def bucket(proxy, tmp_path, request):
    """An empty bucket, and a function that puts a folder's files into it."""
    import fsspec

    system = fsspec.filesystem("s3", use_listings_cache=False)
    name = f"b{abs(hash(request.node.name)) % 10**9}-{os.getpid()}"
    system.mkdir(name)

    def put(*names: str) -> str:
        for each in names:
            system.pipe_file(f"{name}/set/{each}", (tmp_path / each).read_bytes())
        return f"s3://{name}/set"

    return put


def all_windows(data) -> list[tuple[list[int], list[int]]]:
    return [(a.tolist(), b.tolist()) for x, y in data for a, b in zip(x, y, strict=True)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:botocore", "ignore::DeprecationWarning:aiobotocore")
class TestS3:
    @pytest.mark.parametrize("fault", [None, slow, busy(2), cutting], ids=["well", "slow", "busy", "cut"])
    def test_samples_are_those_of_files(self, proxy, bucket, tmp_path, fault):
        shards = write_tokens(tmp_path, [1001, 403, 777])
        url = bucket("t0.bin", "t1.bin", "t2.bin")
        proxy.fault = fault
        data = dp.utils.ShardedDataset(f"{url}/t*.bin", 16, seed=1, sequence_length=20, shards_per_block=2)
        local = dp.utils.ShardedDataset(str(tmp_path), 16, seed=1, sequence_length=20, shards_per_block=2)
        assert all_windows(data) == all_windows(local)
        assert data.describe_order() == local.describe_order()
        proxy.fault, asked = None, proxy.asked.total()
        assert sorted(all_windows(data)) == sorted(windows(shards, 20))
        assert proxy.asked.total() == asked  # the second pass reads the copies on disk

    def test_a_store_that_stays_busy_stops_the_run_or_is_left_out(self, proxy, bucket, tmp_path):
        write_tokens(tmp_path, [101, 101])
        url = bucket("t0.bin", "t1.bin")
        data, lenient = (
            dp.utils.ShardedDataset(url, 4, False, sequence_length=5, retries=3, bad_shards=bad)
            for bad in ("stop", "skip")
        )
        healthy = busy(10**6)
        proxy.fault = lambda handler, name, asked: name.endswith("t1.bin") and healthy(handler, name, asked)
        assert len(data[0][0]) == 4
        before = proxy.asked.total()
        with pytest.raises(DataError, match=r"t1\.bin: not read at byte 0 after 4 attempts \("):
            data[5]
        assert proxy.asked.total() - before >= 4
        with pytest.warns(UserWarning, match=r"skipped: s3://.*t1\.bin: not read"):
            batch = lenient[5]
        assert len(batch[0]) == 4
        assert len(lenient.skipped) == 1

    def test_an_object_that_changes_is_refused(self, bucket, tmp_path):
        write_tokens(tmp_path, [101, 101])
        url = bucket("t0.bin", "t1.bin")
        data = dp.utils.ShardedDataset(url, 4, False, sequence_length=5)
        (tmp_path / "t1.bin").write_bytes(bytes(202))
        bucket("t1.bin")
        data[0]
        with pytest.raises(DataError, match=r"t1\.bin: has changed \(version .*, .* when it was listed\); start again"):
            data[6]
        data = dp.utils.ShardedDataset(url, 4, False, sequence_length=5)
        (tmp_path / "t1.bin").write_bytes(bytes(100))
        bucket("t1.bin")
        with pytest.raises(DataError, match=r"t1\.bin: has changed \(100 bytes, 202 when it was listed\)"):
            data[6]

    def test_missing_objects_buckets_and_hosts(self, proxy, bucket, tmp_path, monkeypatch):
        write_tokens(tmp_path, [101])
        url = bucket("t0.bin")
        for name, expected in {
            f"{url}/gone.bin": "gone.bin: ",
            f"{url}/gone*.bin": r"matches no file; expected files that end in \.parquet",
            f"{url}/empty": r"has no shards",
        }.items():
            with pytest.raises(DataError, match=expected):
                dp.utils.ShardedDataset(name, 4, sequence_length=5, retries=0)
        with pytest.raises(ConfigError, match=r"nosuch://x/y\.bin: Protocol not known: nosuch"):
            dp.utils.ShardedDataset("nosuch://x/y.bin", 4, sequence_length=5)

    def test_tars_and_parquet_files_and_their_index(self, proxy, bucket, tmp_path, capsys):
        pytest.importorskip("pyarrow", reason="Parquet needs pyarrow")
        from dptrain.cli.main import main

        for index in range(3):
            write_tar(tmp_path / f"a{index}.tar", [{"cls": str(10 * index + row).encode()} for row in range(7)])
            write_parquet(tmp_path / f"p{index}.parquet", {"n": np.arange(10 * index, 10 * index + 7)})
        expected = [10 * index + row for index in range(3) for row in range(7)]
        tars = f"{bucket('a0.tar', 'a1.tar', 'a2.tar')}/a{{0..2}}.tar"
        tables = f"{bucket('p0.parquet', 'p1.parquet', 'p2.parquet')}/*.parquet"
        for url in (tars, tables):
            assert dp.utils.ShardedDataset(url, 21, False)[0].tolist() == expected
        assert main(["index", tars]) == 0
        assert "dptrain-index.json: 3 shards, 21 samples, " in capsys.readouterr().out
        before = proxy.asked.copy()
        data = dp.utils.ShardedDataset(tars, 21, False, cache_dir=tmp_path / "other")
        assert {name.rpartition("/")[2] for name in proxy.asked - before} == {"dptrain-index.json"}
        assert data[0].tolist() == expected

    def test_the_cache_keeps_its_bound(self, proxy, bucket, tmp_path):
        """A set ten times the cache, and the memory, trains within them."""
        shards = write_tokens(tmp_path, [5001] * 40)
        url = bucket(*(f"t{index}.bin" for index in range(40)))
        bound = 40 * 10002 // 10
        data = dp.utils.ShardedDataset(
            url, 64, seed=1, sequence_length=20, shards_per_block=2, cache_bytes=bound, max_bytes=bound
        )
        cache, samples = data._set._cache, []
        for index in range(len(data)):
            samples += [a.tolist() for a in data[index][0]]
            assert cache.used_bytes() <= bound
        assert sorted(samples) == sorted(a for a, _ in windows(shards, 20))
        assert all(count <= 3 for name, count in proxy.asked.items() if name.endswith(".bin"))
        with pytest.raises(ConfigError, match=r"2 shards, which are mixed, take up to 20,004 bytes > cache_bytes"):
            dp.utils.ShardedDataset(url, 64, sequence_length=20, shards_per_block=2, cache_bytes=20_000)

    def test_resuming_reads_the_shards_in_flight_only(self, proxy, bucket, tmp_path):
        write_tokens(tmp_path, [1001] * 20)
        url = bucket(*(f"t{index}.bin" for index in range(20)))
        data = dp.utils.ShardedDataset(url, 10, seed=1, sequence_length=10, shards_per_block=2)
        proxy.asked.clear()
        data[50]
        time.sleep(0.3)
        assert 2 <= len([name for name in proxy.asked if name.endswith(".bin")]) <= 4


def test_addresses_of_the_web(tmp_path, monkeypatch):
    pytest.importorskip("aiohttp", reason="https:// needs aiohttp")
    import functools

    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))
    shards = write_tokens(tmp_path, [201, 301])

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_) -> None:
            """Say nothing."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=tmp_path)) as web:
        threading.Thread(target=web.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{web.server_address[1]}/t{{0..1}}.bin"
        try:
            data = dp.utils.ShardedDataset(url, 8, False, sequence_length=10)
            assert all_windows(data) == windows(shards, 10)
        finally:
            web.shutdown()


def test_ranges_in_braces():
    assert expand("a{008..011}-{1..2}.tar")[:3] == ["a008-1.tar", "a008-2.tar", "a009-1.tar"]
    assert len(expand("a{008..011}-{1..2}.tar")) == 8
    assert expand("plain") == ["plain"]
    assert is_pattern("a{0..3}")
    assert is_pattern("a*")
    assert not is_pattern("a{b}.npz")
    with pytest.raises(ConfigError, match="expected a rising range of at most"):
        expand("{0..9999999}{0..9999999}")


def test_errors_are_tried_again_with_growing_waits(monkeypatch):
    waits: list[float] = []
    monkeypatch.setattr("dptrain.data.shards.stores.time.sleep", waits.append)

    def fail() -> None:
        raise TimeoutError("no answer")

    with pytest.raises(DataError, match=r"x: not read at byte 1,000 after 9 attempts \(no answer\)"):
        Store(9)._retried("x", 1000, fail)
    assert waits == [0.5, 1, 2, 4, 8, 16, 30, 30]
