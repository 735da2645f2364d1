"""Starting commands on the emulated CUDA driver, whatever GPU this machine has."""

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.conftest import ROOT, WITHOUT_PICTURES
from tests.launching import Finished, completed, python, run

EMULATOR = ROOT / "tests" / "emulator"


@functools.cache
def _build() -> ModuleType:
    """Return the module that builds the emulator."""
    spec = importlib.util.spec_from_file_location("dptrain_emulator_build", EMULATOR / "build.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(build)
    return build


def emulator_is_missing() -> str:
    """Why the emulator cannot be built, or an empty string."""
    return str(_build().missing() or "")


def skip_without_emulator() -> None:
    """Skip the test, with the reason, where the emulator cannot be built."""
    if reason := emulator_is_missing():
        pytest.skip(reason)


@functools.cache
def _build_once() -> None:
    """Let the first run build the emulator, which it says on standard error, before any output is looked at."""
    done = run([sys.executable, str(EMULATOR / "run"), sys.executable, "-c", ""], timeout=600)
    if done.code and os.environ.get("DPTRAIN_REAL_GPU") == "1":
        # A GPU machine often has no network to build the emulator with; elsewhere nothing may be left out silently.
        pytest.skip(f"the emulator cannot be built beside the real GPU: {done.err.strip().splitlines()[-1]}")
    assert done.code == 0, done.err


def _on_emulator(environment: Mapping[str, str | None]) -> dict[str, str | None]:
    """Return the environment of what runs on the emulator, as `run` takes it; memory that it leaks makes it fail."""
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
    return dict.fromkeys(os.environ) | _build().ready(completed(defaults | environment))


def emulated(*command: str, timeout: float = 300, cwd: Path | None = None, **environment: str | None) -> Finished:
    """Run a command on the emulator."""
    return run(list(command), timeout=timeout, cwd=cwd, **_on_emulator(environment))


def emulated_ranks(
    ranks: int,
    *arguments: str,
    timeout: float = 300,
    cwd: Path | None = None,
    fresh: bool = False,
    through: Sequence[str] = (),
    **environment: str | None,
) -> Finished:
    """Run `python ARGUMENTS` on the emulator, as `tests.launching.python` does."""
    options: dict[str, Any] = {"timeout": timeout, "cwd": cwd, "fresh": fresh, "through": through}
    return python(ranks, *arguments, **options, **_on_emulator(environment))


def inside_emulator() -> bool:
    """Whether this process runs on the emulator already."""
    return "EMULATOR_HOME" in os.environ
