"""Which way messages take: what is kept of a measurement, and what is not believed of it."""

import pytest

from dptrain.backend import create
from dptrain.comm import SoloCommunicator
from dptrain.train import transports

ABOUT, THERE = ["cuda", 2], ["host", "ipc"]


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    return tmp_path / "transports"


def test_a_measurement_is_kept_for_its_kind_of_machine(folder):
    assert transports._kept(ABOUT, THERE) is None
    transports._keep(ABOUT, {"host": 0.5, "ipc": 0.25})
    assert transports._kept(ABOUT, THERE) == {"host": 0.5, "ipc": 0.25}
    assert transports._kept(["cuda", 3], THERE) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        '{"ipc": 0.1}',
        '{"host": 1}',
        '{"host": -0.5}',
        '{"host": NaN}',
        '{"host": 0.5, "cuda-aware": 0.1}',  # which would end the process where MPI knows no GPUs
        '{"host": 0.5, "ipc": [0.1]}',
        '{"host": 0.5}' + " " * 5000 + "x",
    ],
)
def test_what_is_no_measurement_of_what_is_there_is_not_believed(folder, content):
    transports._keep(ABOUT, {"host": 0.5})
    (kept,) = folder.iterdir()
    kept.write_text(content)
    found = transports._kept(ABOUT, THERE)
    assert found is None or (found == {"host": 0.5} and len(content) > transports._KEPT_BYTES)


def test_without_a_place_nothing_is_kept(folder):
    folder.write_text("no folder")
    transports._keep(ABOUT, {"host": 0.5})
    assert transports._kept(ABOUT, THERE) is None


@pytest.mark.parametrize("wanted", ["host", "auto"])
def test_on_a_cpu_messages_go_through_the_host(wanted):
    backend = create("cpu", "float32", 1)
    transports.choose_transport(backend, SoloCommunicator(), wanted)
    assert backend.transport == "host"
