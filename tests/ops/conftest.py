"""Programs on the CUDA backend, where a driver answers: on a GPU, or on the emulator, which chosen files start."""

import ctypes
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

_HERE = Path(__file__).resolve().parent

# Of CUresult, from here on: the context is lost, and all that comes after would fail with it.
_LOST = 700


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """On a real GPU, whose time is short, say at once what failed: a run that is ended prints no summary."""
    if report.failed and os.environ.get("DPTRAIN_REAL_GPU") == "1" and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid}\n{report.longreprtext[-3000:]}", file=sys.stderr, flush=True)


@pytest.hookimpl(trylast=True)
def pytest_runtest_logfinish(nodeid: str) -> None:
    """On a real GPU, leave a process whose context a test has broken; pytest-xdist starts another one."""
    if os.environ.get("DPTRAIN_REAL_GPU") == "1" and "PYTEST_XDIST_WORKER" in os.environ and not no_cuda():
        code = ctypes.CDLL("libcuda.so.1").cuCtxSynchronize()
        if code >= _LOST:
            print(f"{nodeid} broke the GPU's context: CUresult {code}", file=sys.stderr, flush=True)
            os._exit(86)


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Run tests of this folder alone on the emulator where there is no GPU, if it can be built."""
    from tests.emulated import EMULATOR, emulator_is_missing, inside_emulator

    chosen = [Path(config.invocation_params.dir, name.partition("::")[0]).resolve() for name in config.args]
    is_chosen = config.args_source is pytest.Config.ArgsSource.ARGS and all(
        path == _HERE or _HERE in path.parents for path in chosen
    )
    if not is_chosen or inside_emulator() or has_driver() or hasattr(config, "workerinput") or emulator_is_missing():
        return None
    capture = config.pluginmanager.getplugin("capturemanager")
    if capture is not None:
        capture.suspend_global_capture(in_=True)
    print("no GPU: on the emulator", flush=True)
    command = [sys.executable, str(EMULATOR / "run"), sys.executable, "-m", "pytest", *config.invocation_params.args]
    return subprocess.run(command, cwd=config.invocation_params.dir, check=False).returncode


def has_driver() -> bool:
    """Whether a CUDA driver answers here."""
    try:
        return not ctypes.CDLL("libcuda.so.1").cuInit(0)
    except OSError:
        return False


def no_cuda() -> str:
    """Why the CUDA backend cannot run here, or an empty string."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "no CUDA driver; tests/emulator/run python -m pytest tests/ops"
    if driver.cuInit(0):
        return "no usable GPU"
    return "" if importlib.util.find_spec("pycuda") else "PyCUDA is not installed: pip install 'pycuda>=2026.1'"


@pytest.fixture(scope="session")
def cuda_backend():
    """The CUDA backend."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.backend import CudaBackend

    return CudaBackend()


@pytest.fixture
def another(cuda_backend):
    """Return a function that opens a further backend, whose runs join packs."""
    opened = []

    def backend():
        opened.append(type(cuda_backend)())
        opened[-1].joins_packs = True
        return opened[-1]

    yield backend
    for open_backend in opened:
        open_backend.close()
