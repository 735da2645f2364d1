"""CUDA graphs where there is no GPU; with one, see tests/ops/test_cuda_graphs.py."""

import ctypes
import subprocess
import sys
from types import SimpleNamespace

import pytest

from dptrain.backend import create
from dptrain.backend.cuda import graphs
from dptrain.backend.cuda.gpu import driver
from dptrain.errors import DeviceError


@pytest.fixture(autouse=True)
def forgotten():
    """Load the driver anew, before and after."""
    driver.driver.cache_clear()
    yield
    driver.driver.cache_clear()


def test_the_import_loads_no_driver():
    code = (
        "import dptrain.backend.cuda.graphs, pathlib; print('libcuda' in pathlib.Path('/proc/self/maps').read_text())"
    )
    finished = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True)
    assert (finished.stdout, finished.stderr) == ("False\n", "")


def test_without_a_driver_the_error_says_so(monkeypatch):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(DeviceError, match=r"^no NVIDIA driver: .*libcuda.so.1: cannot open"):
        graphs.capture(SimpleNamespace(handle=1)).__enter__()


def test_an_old_driver_is_named(monkeypatch):
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace())
    with pytest.raises(DeviceError, match=r"^the NVIDIA driver has no cuStreamBeginCapture_v2: .* CUDA 11\.4 or later"):
        graphs.capture(SimpleNamespace(handle=1)).__enter__()


@pytest.mark.parametrize("graph", [True, False])
def test_the_option_reaches_the_backend(monkeypatch, graph):
    module = SimpleNamespace(CudaBackend=lambda *arguments: SimpleNamespace(graph=True, description="float32"))
    monkeypatch.setitem(sys.modules, "dptrain.backend.cuda.backend", module)
    assert create("cuda", "float32", 1, cuda_graph=graph).graph is graph


@pytest.mark.parametrize(
    ("launches", "steps"), [(0, 16), (1, 16), (8, 16), (9, 14), (15, 8), (16, 8), (17, 1), (500, 1)]
)
def test_a_graph_holds_several_steps_of_few_launches(launches, steps):
    assert graphs.steps_in_graph(launches) == steps
