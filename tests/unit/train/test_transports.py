"""Which way messages take: what is kept of a measurement, and what is not believed of it."""

import pytest

from dptrain.backend import create
from dptrain.comm import SoloCommunicator
from dptrain.runtime.measurements import Measurements
from dptrain.train import transports

THERE = ["host", "ipc"]
KNOWN = Measurements("transports", ["cuda", 2])


def kept():
    return transports._kept(KNOWN.read(), THERE)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    return tmp_path / "transports"


def test_a_measurement_is_kept_for_its_kind_of_machine(folder):
    assert kept() is None
    KNOWN.keep({"host": 0.5, "ipc": 0.25})
    assert kept() == {"host": 0.5, "ipc": 0.25}
    assert Measurements("transports", ["cuda", 3]).read() == {}


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
        '{"host": 0.5}' + " " * (1 << 20) + "x",
    ],
)
def test_what_is_no_measurement_of_what_is_there_is_not_believed(folder, content):
    KNOWN.keep({"host": 0.5})
    (file,) = folder.iterdir()
    file.write_text(content)
    found = kept()
    assert found is None or (found == {"host": 0.5} and len(content) > 1 << 20)


def test_without_a_place_nothing_is_kept(folder):
    folder.write_text("no folder")
    KNOWN.keep({"host": 0.5})
    assert kept() is None


@pytest.mark.parametrize("wanted", ["host", "auto"])
def test_on_a_cpu_messages_go_through_the_host(wanted):
    backend = create("cpu", "float32", 1)
    transports.choose_transport(backend, SoloCommunicator(), wanted)
    assert backend.transport == "host"
