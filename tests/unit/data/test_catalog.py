"""Data sets by name and by path, and how their files come into the cache: against a server on this machine."""

import gzip
import hashlib
import http.server
import os
import re
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dptrain.data import catalog, strokes
from dptrain.data.catalog import CATALOG, FetchedIdx, cache_dir, ensure_available, open_dataset
from dptrain.errors import ConfigError, DataError, ExitCode, OutputError
from tests.unit.data.idx_files import write_idx

MNIST = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "mnist"
ARRAYS = {
    "train-images-idx3-ubyte": np.arange(6 * 4 * 4, dtype=np.uint8).reshape(6, 4, 4),
    "train-labels-idx1-ubyte": np.arange(6, dtype=np.uint8),
    "t10k-images-idx3-ubyte": np.arange(2 * 4 * 4, dtype=np.uint8).reshape(2, 4, 4),
    "t10k-labels-idx1-ubyte": np.arange(2, dtype=np.uint8),
}
SHAPES = {"x_train": (6, 4, 4), "y_train": (6,), "x_test": (2, 4, 4), "y_test": (2,)}


def write_folder(folder, ending=".gz", dotted=False):
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in ARRAYS.items():
        write_idx(folder / ((name.replace("-idx", ".idx") if dotted else name) + ending), array)
    return folder


def assert_is_tiny(sources):
    for key, array in zip(("x_train", "y_train", "x_test", "y_test"), ARRAYS.values(), strict=True):
        np.testing.assert_array_equal(getattr(sources, key).read(), array)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("DPTRAIN_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "cache"


class Server(http.server.ThreadingHTTPServer):
    """Serves `bodies` by path and remembers what was asked for.

    `announce` overrides a Content-Length, `elsewhere` redirects, `drip` is the time between two bytes.
    """

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies = {}
        self.announce = {}
        self.elsewhere = {}
        self.requested = []
        self.drip = 0.0
        self.delay = 0.0

    def handle_error(self, request, client_address):
        """Say nothing of a client that has gone: another test may be looking at standard error by now."""

    @property
    def address(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        name = self.path[1:]
        self.server.requested.append(name)
        time.sleep(self.server.delay)
        body = self.server.bodies.get(name)
        if name in self.server.elsewhere:
            self.send_response(302)
            self.send_header("Location", self.server.elsewhere[name])
            self.end_headers()
            return
        if body is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.server.announce.get(name, len(body))))
        self.end_headers()
        for at in range(len(body)) if self.server.drip else ():
            self.wfile.write(body[at : at + 1])
            time.sleep(self.server.drip)
        self.wfile.write(b"" if self.server.drip else body)

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A server without TLS, which is then enough."""
    monkeypatch.setattr(catalog, "_SCHEMES", ("http",))
    with Server() as running:
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        for path in write_folder(tmp_path / "served").iterdir():
            running.bodies[path.name] = path.read_bytes()
        yield running
        running.shutdown()
        thread.join()


@pytest.fixture
def tiny(server, monkeypatch):
    """A catalogue entry of four small files on the server, with checksums."""
    digests = [hashlib.sha256(gzip.decompress(server.bodies[f"{name}.gz"])).hexdigest() for name in ARRAYS]
    entry = FetchedIdx(server.address, SHAPES, dict(zip(SHAPES, digests, strict=True)))
    monkeypatch.setitem(CATALOG, "tiny", entry)
    return entry


def refused(name, **options):
    with pytest.raises(DataError) as caught:
        ensure_available(name, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert caught.value.exit_code == ExitCode.DATA
    return message


# Names and paths


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mnits", "unknown data set 'mnits'; did you mean 'mnist'?"),
        ("MNIST", "unknown data set 'MNIST'; did you mean 'mnist'?"),
        ("fashion_mnist", "did you mean 'fashion-mnist'?"),
        ("stroke", "did you mean 'strokes'?"),
        ("quux", "expected one of strokes, mnist, fashion-mnist, a folder of IDX files or an .npz file"),
        ("", "unknown data set ''"),
    ],
)
@pytest.mark.parametrize("call", [ensure_available, open_dataset])
def test_unknown_names(tmp_path, monkeypatch, call, name, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        call(name)
    assert message in str(caught.value)
    assert caught.value.exit_code == ExitCode.CONFIG


@pytest.mark.parametrize("name", ["no/where", "./nowhere", "nothing.npz", "~nobody-of-that-name/x"])
def test_missing_paths(name):
    ensure_available(name)
    with pytest.raises(DataError, match=f"^data: {re.escape(name)} not found; expected a folder of IDX files"):
        open_dataset(name)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("dotted", [False, True])
def test_a_folder_of_idx_files(tmp_path, ending, dotted):
    folder = write_folder(tmp_path / "own", ending, dotted)
    ensure_available(str(folder))
    sources = open_dataset(str(folder))
    assert sources.name == "own"
    assert_is_tiny(sources)


def test_a_folder_without_one_of_the_files(tmp_path):
    folder = write_folder(tmp_path / "own")
    (folder / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(DataError, match=f"^data: {folder}/t10k-labels-idx1-ubyte.gz not found; expected train-images"):
        open_dataset(str(folder))


def test_a_folder_whose_files_do_not_belong_together(tmp_path):
    folder = write_folder(tmp_path / "own")
    write_idx(folder / "train-labels-idx1-ubyte.gz", np.arange(5, dtype=np.uint8))
    with pytest.raises(DataError, match="own: 6 images, 5 labels"):
        open_dataset(str(folder))


def test_an_npz_file_and_the_bound(tmp_path):
    path = tmp_path / "mine.npz"
    np.savez(path, **dict(zip(SHAPES, ARRAYS.values(), strict=True)))
    ensure_available(str(path))
    assert_is_tiny(open_dataset(str(path)))
    with pytest.raises(DataError, match="declared 96 bytes > max_bytes = 95 bytes"):
        open_dataset(str(path), max_bytes=95)


def test_a_file_of_another_kind(tmp_path):
    write_idx(tmp_path / "images", ARRAYS["train-images-idx3-ubyte"])
    with pytest.raises(DataError, match=r"not an .npz archive: first bytes 00000803 \(IDX\? name the folder"):
        open_dataset(str(tmp_path / "images"))


def test_cache_folder(tmp_path, monkeypatch):
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("DPTRAIN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert "dptrain" in cache_dir().parts


# Places of a named set


@pytest.mark.parametrize("where", ["data_dir", "data_dir/tiny", "DPTRAIN_DATA", "cache"])
def test_places_are_searched_before_anything_is_fetched(tmp_path, monkeypatch, server, tiny, where):
    folder = {
        "data_dir": tmp_path / "d",
        "data_dir/tiny": tmp_path / "d" / "tiny",
        "DPTRAIN_DATA": tmp_path / "e" / "tiny",
        "cache": tmp_path / "cache" / "tiny",
    }[where]
    write_folder(folder)
    data_dir = tmp_path / "d" if where.startswith("data_dir") else None
    if where == "DPTRAIN_DATA":
        monkeypatch.setenv("DPTRAIN_DATA", str(tmp_path / "e"))
    ensure_available("tiny", data_dir=data_dir)
    sources = open_dataset("tiny", data_dir=data_dir)
    assert sources.name == "tiny"
    assert Path(sources.x_train.where).parent == folder
    assert_is_tiny(sources)
    assert server.requested == []


def test_a_data_folder_that_is_missing_or_incomplete_is_an_error_and_not_fetched_over(tmp_path, server, tiny):
    message = refused("tiny", data_dir=tmp_path / "no")
    assert f"data: {tmp_path / 'no'}/train-images-idx3-ubyte.gz not found" in message
    folder = write_folder(tmp_path / "d")
    (folder / "train-labels-idx1-ubyte.gz").unlink()
    assert f"data: {folder}/train-labels-idx1-ubyte.gz not found" in refused("tiny", data_dir=folder)
    assert server.requested == []


def test_opening_what_nobody_made_available(tmp_path, tiny):
    (tmp_path / "d").mkdir()
    with pytest.raises(
        DataError, match=r"data: \S+/d/train-images-idx3-ubyte.gz not found \(looked in .*cache/tiny, .*datasets/tiny\)"
    ):
        open_dataset("tiny", data_dir=tmp_path / "d")


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"the real MNIST is not at {MNIST}")
def test_the_real_mnist_in_a_data_folder():
    ensure_available("mnist", data_dir=MNIST)
    sources = open_dataset("mnist", data_dir=MNIST)
    assert sources.x_train.shape == (60000, 28, 28)
    assert sources.y_test.read()[:5].tolist() == [7, 2, 1, 0, 4]


# Fetching


@pytest.mark.skipif(not MNIST.is_dir(), reason=f"the real MNIST is not at {MNIST}")
def test_the_real_mnist_passes_its_pinned_checksums(server, monkeypatch):
    server.bodies = {path.name: path.read_bytes() for path in MNIST.iterdir()}
    monkeypatch.setitem(CATALOG, "mnist", replace(CATALOG["mnist"], address=server.address))
    ensure_available("mnist")
    assert len(server.requested) == 4
    assert open_dataset("mnist").x_test.read()[0].sum() == 18454


def test_fetched_once(cache, server, tiny):
    ensure_available("tiny")
    assert sorted(server.requested) == sorted(f"{name}.gz" for name in ARRAYS)
    assert_is_tiny(open_dataset("tiny"))
    ensure_available("tiny")
    assert len(server.requested) == 4
    assert sorted(path.name for path in (cache / "tiny").glob("*")) == sorted([".lock", *(f"{n}.gz" for n in ARRAYS)])


def test_fetching_goes_on_where_it_stopped(cache, server, tiny):
    del server.bodies["t10k-images-idx3-ubyte.gz"]
    assert "t10k-images-idx3-ubyte.gz answers 404 Not Found; put train-images" in refused("tiny")
    # A process that was killed in the middle of a download leaves this.
    (cache / "tiny" / "t10k-images-idx3-ubyte.gz.part").write_bytes(b"half")
    server.bodies["t10k-images-idx3-ubyte.gz"] = gzip.compress(
        bytes((0, 0, 8, 3)) + np.array([2, 4, 4], ">u4").tobytes() + ARRAYS["t10k-images-idx3-ubyte"].tobytes()
    )
    ensure_available("tiny")
    assert server.requested.count("train-images-idx3-ubyte.gz") == 1
    assert_is_tiny(open_dataset("tiny"))
    assert not list((cache / "tiny").glob("*.part"))


def test_offline_says_which_files_to_put_where(cache, monkeypatch):
    monkeypatch.setattr(catalog, "_SCHEMES", ("http",))
    with socket.socket() as silent:  # it has the port, so that nobody else gets it, and does not listen
        silent.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        monkeypatch.setitem(CATALOG, "tiny", FetchedIdx(address, SHAPES, dict.fromkeys(SHAPES, "")))
        message = refused("tiny")
    assert message.startswith(f"data: tiny is not on this machine and {address}train-images-idx3-ubyte.gz cannot")
    assert "Connection refused" in message
    assert (
        "put train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz, t10k-images-idx3-ubyte.gz, "
        f"t10k-labels-idx1-ubyte.gz into {cache / 'tiny'}, or name their folder with --data-dir"
    ) in message


@pytest.mark.parametrize(
    ("name", "damage", "message"),
    [
        (
            "train-images-idx3-ubyte.gz",
            lambda b: b"<!DOCTYPE html><p>",
            "first bytes 3c21444f (HTML?), expected 00000803",
        ),
        ("train-labels-idx1-ubyte.gz", lambda b: b"<html>no</html>", "first bytes 3c68746d (HTML?), expected 00000801"),
        ("train-images-idx3-ubyte.gz", lambda b: b[:-12], "the compressed data ends early"),
        ("train-images-idx3-ubyte.gz", lambda b: b[:-8] + b"\0" * 4 + b[-4:], "damaged (CRC check failed"),
        ("train-images-idx3-ubyte.gz", lambda b: b"", "not IDX: only 0 bytes"),
        (
            "t10k-labels-idx1-ubyte.gz",
            lambda b: gzip.compress(gzip.decompress(b)[:-1] + b"\7"),
            "content has SHA-256",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            lambda b: gzip.compress(b"\0\0\x08\1\0\0\0\3abc"),
            "uint8 3, expected uint8 2",
        ),
        (
            "t10k-labels-idx1-ubyte.gz",
            lambda b: gzip.compress(b"\0\0\x08\4" + b"\xff" * 16),
            "> max_bytes",
        ),
    ],
    ids=["HTML images", "HTML labels", "cut gzip", "CRC", "empty", "content", "count", "bomb"],
)
def test_what_is_not_the_data_set_does_not_reach_the_cache(cache, server, tiny, name, damage, message):
    server.bodies[name] = damage(server.bodies[name])
    text = refused("tiny")
    assert message in text
    assert text.startswith(f"{server.address}{name}: ")
    assert str(cache / "tiny") in text
    assert ".part" not in text
    assert not (cache / "tiny" / name).exists()
    assert not list((cache / "tiny").glob("*.part"))


def test_a_body_that_is_cut_short(cache, server, tiny):
    name = "train-images-idx3-ubyte.gz"
    size = len(server.bodies[name])
    server.announce[name] = size + 100
    assert f"{server.address}{name}: {size + 100} bytes announced, {size} received; try again" in refused("tiny")
    assert not (cache / "tiny" / name).exists()


@pytest.mark.parametrize(("more", "words"), [(0, "not IDX"), (1, "longer than 1.0 kB")])
def test_a_body_that_does_not_end(server, tiny, more, words):
    """gzip adds a thousandth and a header at most to what it cannot compress."""
    server.bodies["train-labels-idx1-ubyte.gz"] = b"x" * (8 + 6 + 1024 + more)
    assert words in refused("tiny")


def test_a_server_that_sends_byte_after_byte(server, tiny, monkeypatch):
    monkeypatch.setattr(catalog, "FETCH_TIMEOUT", 0.2)
    server.drip = 0.25
    before = time.monotonic()
    assert "takes longer than" in refused("tiny")
    assert time.monotonic() - before < server.drip * len(server.bodies["train-images-idx3-ubyte.gz"]) / 2


def test_what_is_fetched_is_pinned_and_comes_by_https():
    for name in ("mnist", "fashion-mnist"):
        entry = CATALOG[name]
        assert entry.address.startswith("https://")
        assert {key for pins in (entry.sha256, entry.gz_sha256) for key in pins} == set(entry.shapes)
        assert all(re.fullmatch("[0-9a-f]{64}", value) for value in [*entry.sha256.values(), *entry.gz_sha256.values()])


def test_plain_http_is_refused_unasked(server, tiny, monkeypatch):
    monkeypatch.setattr(catalog, "_SCHEMES", ("https",))
    assert f"can only be fetched by https: {server.address}train-images-idx3-ubyte.gz; put train-images" in refused(
        "tiny"
    )
    assert server.requested == []


@pytest.mark.parametrize("elsewhere", ["ftp://127.0.0.1/x.gz", "https://127.0.0.1/x.gz"])
def test_a_redirect_to_another_scheme_is_not_followed(server, tiny, elsewhere):
    server.elsewhere["train-images-idx3-ubyte.gz"] = elsewhere
    assert f"can only be fetched by http: {elsewhere}; put train-images" in refused("tiny")


def test_what_has_no_checksum_is_not_fetched(server, monkeypatch):
    monkeypatch.setitem(CATALOG, "tiny", FetchedIdx(server.address, SHAPES))
    assert "tiny is not on this machine, and not downloaded without a known SHA-256; put train-images" in refused(
        "tiny"
    )
    assert server.requested == []


def test_a_file_that_is_pinned_as_it_is_sent(cache, server, monkeypatch):
    digests = [hashlib.sha256(server.bodies[f"{name}.gz"]).hexdigest() for name in ARRAYS]
    entry = FetchedIdx(server.address, SHAPES, gz_sha256=dict(zip(SHAPES, digests, strict=True)))
    monkeypatch.setitem(CATALOG, "tiny", entry)
    ensure_available("tiny")
    assert_is_tiny(open_dataset("tiny"))
    name = "t10k-labels-idx1-ubyte.gz"
    (cache / "tiny" / name).unlink()
    server.bodies[name] = gzip.compress(gzip.decompress(server.bodies[name]), 1, mtime=1)
    assert f"{server.address}{name}: has SHA-256" in refused("tiny")


# The folder in the cache


def test_another_users_folder_is_not_written_to(cache, server, tiny, monkeypatch):
    (cache / "tiny").mkdir(parents=True)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(
        OutputError, match=r"cannot write the cache \(the folder belongs to another user\); set DPTRAIN"
    ):
        ensure_available("tiny")


def test_nobody_else_writes_to_the_folder_of_a_set(cache, server, tiny):
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny").chmod(0o777)
    before = os.umask(0)
    try:
        ensure_available("tiny")
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o022 for path in (cache / "tiny").glob("*.gz")} == {
        f"{name}.gz": 0 for name in ARRAYS
    }
    assert (cache / "tiny").stat().st_mode & 0o777 == 0o755


def test_nothing_is_written_through_a_link(cache, server, tiny, tmp_path):
    """What somebody has left where the folder was open to all."""
    (tmp_path / "precious").write_text("mine")
    (cache / "tiny").mkdir(parents=True)
    (cache / "tiny" / "train-images-idx3-ubyte.gz.part").symlink_to(tmp_path / "precious")
    ensure_available("tiny")
    assert (tmp_path / "precious").read_text() == "mine"
    assert not (cache / "tiny" / "train-images-idx3-ubyte.gz").is_symlink()


def test_a_server_that_does_not_answer(server, tiny, monkeypatch):
    server.delay = 10.0
    monkeypatch.setattr(catalog, "CONNECT_TIMEOUT", 0.1)
    assert "cannot be reached (timed out)" in refused("tiny")


def test_a_server_that_is_too_slow(server, tiny, monkeypatch):
    monkeypatch.setattr(catalog, "FETCH_TIMEOUT", -1.0)
    # The lock would not wait either; the download is asked for directly.
    with pytest.raises(DataError, match="takes longer than"):
        list(catalog._download("tiny", server.address + "train-images-idx3-ubyte.gz"))


def test_a_cache_that_cannot_be_written(tmp_path, monkeypatch, tiny):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(OutputError, match=r"cannot write the cache \(Not a directory\); set DPTRAIN_CACHE") as caught:
        ensure_available("tiny")
    assert caught.value.exit_code == ExitCode.IO


CHILD = """
import sys
from dptrain.data import catalog
from dptrain.data.catalog import CATALOG, FetchedIdx, ensure_available, open_dataset
shapes = {"x_train": (6, 4, 4), "y_train": (6,), "x_test": (2, 4, 4), "y_test": (2,)}
catalog._SCHEMES = ("http",)
CATALOG["tiny"] = FetchedIdx(sys.argv[1], shapes, dict(zip(shapes, sys.argv[2:])))
print("ready", flush=True)
sys.stdin.readline()
ensure_available("tiny")
print(open_dataset("tiny").x_train.read().sum())
"""


def test_of_several_processes_one_fetches(server, tiny):
    server.delay = 0.1
    command = [sys.executable, "-W", "error", "-c", CHILD, server.address, *tiny.sha256.values()]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    children = [subprocess.Popen(command, cwd=Path(catalog.__file__).parents[2], **pipes) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == ["ready\n"] * 3
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()
    outputs = [child.communicate(timeout=60)[0] for child in children]
    assert outputs == [f"{ARRAYS['train-images-idx3-ubyte'].sum()}\n"] * 3
    assert [child.returncode for child in children] == [0, 0, 0]
    assert sorted(server.requested) == sorted(f"{name}.gz" for name in ARRAYS)


# The generated set


@pytest.fixture
def drawn(monkeypatch):
    """`strokes.generate` makes a small set, and the calls are counted."""
    calls = []
    real = strokes.generate

    def generate():
        calls.append(1)
        return real(20, 10)

    monkeypatch.setattr(strokes, "generate", generate)
    return calls


def test_strokes_are_drawn_once(cache, drawn):
    ensure_available("strokes")
    ensure_available("strokes")
    assert len(drawn) == 1
    sources = open_dataset("strokes")
    assert sources.name == "strokes"
    expected = strokes._draw_split(20, 0, 0)
    np.testing.assert_array_equal(sources.x_train.read(), expected[0])
    np.testing.assert_array_equal(sources.y_train.read(), expected[1])
    assert {path.name for path in (cache / "strokes").iterdir()} == {".lock", f"strokes-v{strokes.VERSION}.npz"}


def test_a_damaged_cache_is_drawn_again(cache, drawn):
    ensure_available("strokes")
    path = cache / "strokes" / f"strokes-v{strokes.VERSION}.npz"
    path.write_bytes(path.read_bytes()[:-500])
    ensure_available("strokes")
    assert len(drawn) == 2
    assert open_dataset("strokes").x_test.shape == (10, 28, 28)


def test_another_version_of_the_generator_draws_again(drawn, monkeypatch):
    ensure_available("strokes")
    monkeypatch.setattr(strokes, "VERSION", strokes.VERSION + 1)
    ensure_available("strokes")
    assert len(drawn) == 2


def test_a_full_disk_leaves_no_half_file(cache, drawn, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "savez", full)
    with pytest.raises(OutputError, match="No space left on device"):
        ensure_available("strokes")
    assert {path.name for path in (cache / "strokes").iterdir()} == {".lock"}


def test_strokes_that_nobody_drew(cache):
    with pytest.raises(DataError, match=f"^data: {cache}/strokes/strokes-v{strokes.VERSION}.npz not found"):
        open_dataset("strokes")


@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "t10k-labels-idx1-ubyte.gz", "set.npz"])
def test_a_named_pipe_is_no_file_of_a_set_and_not_opened(tmp_path, name):
    for other, array in ARRAYS.items():
        if not name.startswith(other):
            write_idx(tmp_path / other, array)
    os.mkfifo(tmp_path / name)
    location = tmp_path / name if name == "set.npz" else tmp_path
    with pytest.raises(DataError, match=f"{name}.*(: .*a named pipe| not found)"):
        open_dataset(str(location))


def test_a_device_is_refused():
    with pytest.raises(DataError, match=r"/dev/zero: .*a character device"):
        open_dataset("/dev/zero")
