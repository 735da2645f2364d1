"""The emulator for the tests of this folder: built on first use, skipped with the reason where that cannot be."""

from __future__ import annotations

import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
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
        self.servers: dict[bool, subprocess.Popen[str]] = {}  # of bugs.py, by whether what they compile is checked

    def run(self, *command: str, timeout: float = 300, **options: str) -> Completed:
        """Runs a command with these environment variables; its output is text."""
        return subprocess.run(
            command, env=self.environment | options, capture_output=True, text=True, timeout=timeout, check=False,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def python(self, script: str, *arguments: str, timeout: float = 300, **options: str) -> Completed:
        """Runs a script of this folder."""
        return self.run(sys.executable, str(HERE / script), *arguments, timeout=timeout, **options)

    def code(self, text: str, *arguments: str, timeout: float = 300, **options: str) -> Completed:
        """Runs Python code."""
        return self.run(sys.executable, "-c", text, *arguments, timeout=timeout, **options)

    def bug(self, name: str, *seeds: str, timeout: float = 300, **options: str) -> Completed:
        """Runs bugs.py as `python` does, in a fork of a process that has imported and compiled everything."""
        checked = "EMULATOR_SANITIZE" in options
        if checked not in self.servers:
            self.servers[checked] = subprocess.Popen(
                [sys.executable, str(HERE / "bugs.py"), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                text=True, env=self.environment | ({"EMULATOR_SANITIZE": "all"} if checked else {}),
                start_new_session=True,
            )  # fmt: skip
        server = self.servers[checked]
        assert server.stdin
        assert server.stdout
        with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
            print(json.dumps([[name, *seeds], options, [out.name, err.name]]), file=server.stdin, flush=True)
            if select.select([server.stdout], [], [], timeout)[0]:
                return Completed([name, *seeds], int(server.stdout.readline()), out.read(), err.read())
            os.killpg(server.pid, signal.SIGKILL)
            raise subprocess.TimeoutExpired([name, *seeds], timeout, out.read(), err.read())

    def close(self) -> None:
        """Ends the servers."""
        for server in self.servers.values():
            server.communicate()


@pytest.fixture(scope="session")
def emulator() -> Iterator[Emulator]:
    build = load("build")
    if reason := build.missing():
        pytest.skip(reason)
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    try:
        environment = build.ready()
    except build.BuildError as error:
        if os.environ.get("DPTRAIN_REAL_GPU") != "1":
            raise
        # A GPU machine often has no network to build the emulator with; elsewhere nothing may be left out silently.
        pytest.skip(f"the emulator cannot be built beside the real GPU: {str(error).splitlines()[0]}")
    ready = Emulator(environment)
    yield ready
    ready.close()
