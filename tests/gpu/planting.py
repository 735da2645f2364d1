"""A pytest plugin that runs the chosen tests once for each planted bug, in a fork that has the bug.

The forks share what takes longest: starting Python, importing, and collecting the tests. CUDA is started in the fork,
and so are the modules that a bug may change imported there, or their source is run again in their place.

DPTRAIN_PLANTED names a file of lines, each a bug as JSON: name, file, text (the whole file with the bug), tests (an
expression as pytest's -k) and options (environment variables). Each fork's result goes, as a line of JSON, to the same
name with ".found".
"""

import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


class _Named(Mapping[str, bool]):
    """The names of an expression of -k: whether a test's own name has them in it."""

    def __init__(self, item: pytest.Item) -> None:
        self._name = item.nodeid

    def __getitem__(self, name: str) -> bool:
        return name in self._name

    def __iter__(self) -> Any:
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError


class _Failures:
    """Prints and counts what fails."""

    def __init__(self) -> None:
        self.count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.count += 1
            print(f"\n{report.nodeid}\n{report.longreprtext}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool:
    """Run the tests of every bug instead of all tests."""
    planted = Path(os.environ["DPTRAIN_PLANTED"])
    assert "pycuda.driver" not in sys.modules, "CUDA must be started after the fork"
    with planted.with_suffix(".found").open("w") as outcomes:
        for line in planted.read_text().splitlines():
            bug = json.loads(line)
            with tempfile.TemporaryFile() as output:
                sys.stdout.flush()
                process = os.fork()
                if process == 0:
                    os._exit(_run(session, bug, output.fileno()))
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                output.seek(0)
                printed = output.read().decode(errors="replace")
            print(json.dumps({"name": bug["name"], "status": status, "output": printed}), file=outcomes, flush=True)
    return True


def _run(session: pytest.Session, bug: dict[str, Any], output: int) -> int:
    """Plant a bug and run its tests up to the first that fails: 0 for none, 1 for one, 5 where there are none."""
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(bug["options"])
    try:
        with tempfile.TemporaryDirectory() as folder:
            if bug["file"].startswith("kernels/"):
                _plant_kernel(bug, Path(folder))
            else:
                _plant_module(bug)
            return _tests(session, bug["tests"])
    except BaseException:
        traceback.print_exc()
        return 3
    finally:
        sys.stdout.flush()


def _tests(session: pytest.Session, expression: str) -> int:
    chosen = [item for item in session.items if eval(expression, {"__builtins__": {}}, _Named(item))]
    session.items[:] = chosen  # fixtures make what these need
    failures = _Failures()
    session.config.pluginmanager.register(failures)
    for item, following in zip(chosen, [*chosen[1:], None], strict=True):
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if failures.count:
            return 1
    return 0 if chosen else 5


def _plant_module(bug: dict[str, Any]) -> None:
    """Run a module's changed source, in its place if it has been imported: what others took from it they take anew."""
    name = bug["file"].removesuffix(".py").replace("/", ".")
    code = compile(bug["text"], str(ROOT / bug["file"]), "exec")
    module = sys.modules.get(name)
    if module is None:
        parent, _, last = name.rpartition(".")
        spec = importlib.util.spec_from_file_location(name, ROOT / bug["file"])
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        setattr(importlib.import_module(parent), last, module)
    exec(code, module.__dict__)
    for other in [
        loaded_module
        for key, loaded_module in sys.modules.items()
        if key.startswith(("dptrain.", "tests.")) and loaded_module is not module
    ]:
        for key, value in list(vars(other).items()):
            if getattr(value, "__module__", None) == name and hasattr(module, key):
                setattr(other, key, getattr(module, key))
            elif isinstance(value, dict):  # a table of functions
                for entry, function in value.items():
                    if getattr(function, "__module__", None) == name and hasattr(
                        module, getattr(function, "__name__", "")
                    ):
                        value[entry] = getattr(module, function.__name__)


def _plant_kernel(bug: dict[str, Any], folder: Path) -> None:
    """Let generated sources be compiled with the changed file."""
    from dptrain.backend.cuda import compile as compiling

    shutil.copytree(ROOT / "kernels", folder, dirs_exist_ok=True)
    (folder / Path(bug["file"]).name).write_text(bug["text"])
    compiling.kernels_dir = lambda: folder
