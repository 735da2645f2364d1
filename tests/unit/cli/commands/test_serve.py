"""What `serve` refuses before it takes a request; what it does then is in tests/e2e/test_serve.py."""

import socket
import sys

import pytest

import dptrain as dp
from dptrain import layers
from dptrain.cli.main import main

for module in ("starlette", "uvicorn", "prometheus_client"):
    pytest.importorskip(module)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "model.keras"
    dp.Sequential([layers.Input((2,)), layers.Dense(1)]).save(path)
    return path


def refused(capfd, *arguments):
    code = main(["serve", *map(str, arguments)])
    out, err = capfd.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    return code, err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--host 0.0.0.0", "other machines may reach it; add --token-file"),
        ("--port 65536", "--port 65536: expected an integer from 0 to 65535"),
        ("--port -1", "expected"),
        ("--max-batch 0", "--max-batch 0: expected an integer from 1"),
        ("--timeout 1.5", "--timeout 1.5: expected an integer"),
        ("--batch-wait many", "--batch-wait many: expected an integer"),
        ("--token-file missing", "--token-file missing: No such file"),
        ("--token-file short", "16 or more letters"),
        ("--unseen other", "--unseen: the model was trained on arrays"),
        ("--host nowhere.invalid --token-file token", "--host nowhere.invalid: "),
    ],
)
def test_a_server_is_not_started_with(path, capfd, monkeypatch, tmp_path, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "short").write_text("secret\n")
    (tmp_path / "token").write_text("0123456789abcdef\n")
    code, error = refused(capfd, path, *arguments.split())
    assert (code, message in error) == (2, True), error


def test_a_port_that_is_taken_is_named(path, capfd):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, error = refused(capfd, path, "--port", port)
    assert code == 74
    assert f"cannot listen on 127.0.0.1, port {port}: " in error


def test_a_model_that_cannot_be_read_is_named(capfd, tmp_path):
    (tmp_path / "model.keras").write_bytes(b"damaged")
    for name, message in (("model.keras", "model.keras"), ("nowhere", "nowhere: not found")):
        code, error = refused(capfd, tmp_path / name, "--port", 0)
        assert code == 65
        assert message in error


def test_help_shows_what_there_is(capfd):
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    out = capfd.readouterr().out
    for text in ("python -m dptrain serve RUN [options]", "--token-file FILE", "--unseen", "--batch-wait MS"):
        assert text in out


@pytest.mark.parametrize("module", ["starlette", "uvicorn", "prometheus_client"])
def test_what_is_not_installed_is_named(path, capfd, monkeypatch, module):
    for name in [name for name in sys.modules if name.startswith(("dptrain.cli.server.", f"{module}."))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    code, error = refused(capfd, path, "--port", "70000")  # which would be refused next
    assert code == 2
    assert f"serve needs {module}: pip install" in error
