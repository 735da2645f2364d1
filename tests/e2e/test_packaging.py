"""What a wheel and a source distribution hold, where an editable install is found, and whom the wheel serves."""

import contextlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.launching import find_mpirun, run

# Of the interpreters that dptrain is for: 3.12 is between two that are tried.
VERSIONS = ("3.11", "3.13", "3.14")
OTHERS = [version for version in VERSIONS if version != platform.python_version().rpartition(".")[0]]
ROOMS = ("benchmarks", "docs", "dptrain", "examples", "kernels", "launch", "tests")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this tree."""
    folder = tmp_path_factory.mktemp("wheel")
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if built.returncode != 0 and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("no package registry to build a wheel with")
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("dptrain-*.whl")
    return wheel


def test_wheel_holds_package_kernels_and_type_marker(wheel):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dptrain").rglob("*.py")}
    assert modules <= names
    kernels = {f"dptrain/_kernels/{path.name}" for path in (ROOT / "kernels").iterdir() if path.is_file()}
    assert {"dptrain/py.typed", "dptrain/cli/reporting/report.html.jinja", *kernels} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def interpreter(version: str) -> str | None:
    """Return an interpreter of this version, as found on PATH or among pyenv's."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    beside = sorted((pyenv / "versions").glob(f"{version}.*/bin/python{version}"))
    for name in (f"python{version}", *map(str, beside)):
        code = "import sys, venv, ensurepip; print(sys.version)"
        with contextlib.suppress(OSError):  # not there; a shim of pyenv's that stands for nothing fails
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, timeout=60)
            if done.stdout.startswith(f"{version}."):
                return name
    return None


def installed(wheel: Path, version: str, folder: Path) -> Path:
    """Install a wheel with an MPI for an interpreter; return the folder of its commands."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version}, on PATH or among pyenv's")
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=120)
    command = [sys.executable, "-m", "pip", "--python", str(folder / "bin" / "python"), "install", "--quiet"]
    command += ["--no-compile", "--only-binary", ":all:", f"dptrain[mpich] @ {wheel.as_uri()}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    if done.returncode and "No matching distribution found" in done.stderr:
        pytest.skip(f"no wheels for Python {version}: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def trained(bin: Path, data: Path, folder: Path) -> dict[str, float]:
    """Train compiled on two ranks in a folder with commands of this one; return the metrics."""
    command = [str(bin / "mpirun"), "-n", "2", str(bin / "python"), "-m", "dptrain", "--jit-compile", "on"]
    done = run([*command, "--data", str(data), "--epochs", "1", "--hidden", "16", "--out", "run"], cwd=folder)
    assert (done.code, done.err) == (0, "")
    return json.loads((folder / "run" / "summary.json").read_text())["metrics"]


@pytest.fixture(scope="module")
def metrics(small_npz, tmp_path_factory):
    """Those of a training with the interpreter of the tests."""
    return trained(Path(find_mpirun()).parent, small_npz, tmp_path_factory.mktemp("own"))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("version", OTHERS)
def test_other_interpreters_train_to_the_same_numbers(version, wheel, metrics, small_npz, tmp_path):
    installed_metrics = trained(installed(wheel, version, tmp_path / "venv"), small_npz, tmp_path)
    assert installed_metrics == pytest.approx(metrics, rel=1e-4)


@pytest.fixture(scope="module")
def tools(tmp_path_factory):
    """A folder with the declared version of setuptools."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    folder = tmp_path_factory.mktemp("tools")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", str(folder)]
    if subprocess.run([*command, "setuptools>=77"], capture_output=True, timeout=180).returncode:
        pytest.skip("no package registry to get setuptools from")
    return folder


def build(kind: str, tools: Path, out: Path, tmp_path: Path) -> Path:
    """Build a distribution of a copy of the repository; return its file."""
    copy = tmp_path / "clone" / "dptrain"
    for room in ROOMS:
        shutil.copytree(ROOT / room, copy / room, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, copy)
    for place in ("dptrain", "tests", "examples"):
        (copy / place / "__pycache__").mkdir()
        (copy / place / "__pycache__" / "old.cpython-311.pyc").write_bytes(b"")
    (copy / "runs").mkdir()
    (copy / "runs" / "config.yaml").write_text("")
    code = f"import setuptools.build_meta as b; b.build_{kind}({str(out)!r})"
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=180
    )
    assert built.returncode == 0, built.stderr
    (archive,) = out.iterdir()
    return archive


@pytest.mark.long
def test_source_distribution_holds_what_belongs_to_the_repository_and_no_caches(tools, tmp_path):
    (tmp_path / "out").mkdir()
    with tarfile.open(build("sdist", tools, tmp_path / "out", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts) and path.suffix != ".pyc"
    }
    assert files - names == set()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "SECURITY.md", "mkdocs.yml", "pyproject.toml"} <= names
    unwanted = ("__pycache__", ".pyc", "runs/", ".git/")
    assert [name for name in names if any(word in name for word in unwanted)] == []


@pytest.mark.long
def test_an_editable_install_is_found_from_the_folder_above_a_clone_named_dptrain(tools, tmp_path):
    """The clone's own folder is a package without __init__.py there, which anything on the path must beat."""
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(build("editable", tools, tmp_path / "out", tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    code += "import importlib.util; print(importlib.util.find_spec('dptrain').origin)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]  # without what this environment has installed
    for place in (tmp_path / "clone", tmp_path):
        done = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout.strip() == str(tmp_path / "clone" / "dptrain" / "dptrain" / "__init__.py"), done.stderr
