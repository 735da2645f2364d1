"""The emulator for the tests of this folder: built on first use, skipped with the reason where that cannot be."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

HERE = Path(__file__).resolve().parent
Completed = subprocess.CompletedProcess[str]


def load(name: str) -> ModuleType:
    """A module of this folder under a name that collides with no package."""
    spec = importlib.util.spec_from_file_location(f"dptrain_emulator_{name}", HERE / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Emulator:
    """Runs commands on the emulator."""

    def __init__(self, environment: dict[str, str]) -> None:
        options = [name for name in environment if name.startswith("EMULATOR_") and name != "EMULATOR_HOME"]
        self.environment = {name: value for name, value in environment.items() if name not in options}
        self.environment.pop("CUDA_VISIBLE_DEVICES", None)

    def run(self, *command: str, timeout: float = 120, **options: str) -> Completed:
        """Runs a command with these environment variables; its output is text."""
        return subprocess.run(
            command, env=self.environment | options, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def python(self, script: str, *arguments: str, timeout: float = 120, **options: str) -> Completed:
        """Runs a script of this folder."""
        return self.run(sys.executable, str(HERE / script), *arguments, timeout=timeout, **options)

    def code(self, text: str, *arguments: str, timeout: float = 120, **options: str) -> Completed:
        """Runs Python code."""
        return self.run(sys.executable, "-c", text, *arguments, timeout=timeout, **options)


@pytest.fixture(scope="session")
def emulator() -> Emulator:
    build = load("build")
    if reason := build.missing():
        pytest.skip(reason)
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    try:
        return Emulator(build.ready())
    except build.BuildError as error:
        if os.environ.get("DPTRAIN_REAL_GPU") != "1":
            raise
        # A GPU machine often has no network to build the emulator with; elsewhere nothing may be left out silently.
        pytest.skip(f"the emulator cannot be built beside the real GPU: {str(error).splitlines()[0]}")
