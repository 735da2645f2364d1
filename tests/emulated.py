"""Starting commands on the emulated CUDA driver, whatever GPU this machine has."""

import functools
import importlib.util
import os
import sys
from pathlib import Path

import pytest

from tests.conftest import ROOT, WITHOUT_PICTURES
from tests.launching import Finished, run

EMULATOR = ROOT / "tests" / "emulator"


def skip_without_emulator() -> None:
    """Skip the test, with the reason, where the emulator cannot be built."""
    spec = importlib.util.spec_from_file_location("dptrain_emulator_build_check", EMULATOR / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    if reason := build.missing():
        pytest.skip(reason)


@functools.cache
def _build_once() -> None:
    """Let the first run build the emulator, which it says on standard error, before any output is looked at."""
    done = run([sys.executable, str(EMULATOR / "run"), sys.executable, "-c", ""], timeout=600)
    if done.code and os.environ.get("DPTRAIN_REAL_GPU") == "1":
        # A GPU machine often has no network to build the emulator with; elsewhere nothing may be left out silently.
        pytest.skip(f"the emulator cannot be built beside the real GPU: {done.err.strip().splitlines()[-1]}")
    assert done.code == 0, done.err


def emulated(*command: str, timeout: float = 300, cwd: Path | None = None, **environment: str | None) -> Finished:
    """Run a command on the emulator; memory that it leaks makes it fail."""
    skip_without_emulator()
    _build_once()
    defaults: dict[str, str | None] = {
        "EMULATOR_LEAKS": "fail",
        # Of addresses: tests that reach far ones touch few pages.
        "EMULATOR_MEMORY": "32G",
        "PYTHONPATH": os.pathsep.join((str(WITHOUT_PICTURES), str(ROOT))),
        "PYTHONDONTWRITEBYTECODE": "1",
        # A mask of this machine's GPUs, which a scheduler or an earlier test has set, is not one of the emulator's.
        "CUDA_VISIBLE_DEVICES": None,
    }
    return run([sys.executable, str(EMULATOR / "run"), *command], timeout=timeout, cwd=cwd, **(defaults | environment))


def emulated_ranks(ranks: int, *arguments: str, **options: str) -> Finished:
    """Run `python ARGUMENTS` on the emulator: alone for 0 ranks, else under mpirun."""
    if ranks == 0:
        return emulated(sys.executable, *arguments, **options)
    beside = Path(sys.executable).with_name("mpirun")
    launcher = str(beside) if beside.exists() else "mpirun"
    return emulated(launcher, "-n", str(ranks), sys.executable, *arguments, **options)


def inside_emulator() -> bool:
    """Whether this process runs on the emulator already."""
    return "EMULATOR_HOME" in os.environ
