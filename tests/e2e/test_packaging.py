"""What a wheel and a source distribution hold, and where an editable install is found."""

import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

ROOMS = ("benchmarks", "docs", "dptrain", "examples", "kernels", "launch", "tests")


def test_wheel_holds_package_kernels_and_type_marker(tmp_path):
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "-w", str(tmp_path), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=180)
    if built.returncode != 0 and "No matching distribution found for setuptools" in built.stderr:
        pytest.skip("no package registry to build a wheel with")
    assert built.returncode == 0, built.stderr
    (wheel,) = tmp_path.glob("dptrain-*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dptrain").rglob("*.py")}
    assert modules <= names
    kernels = {f"dptrain/_kernels/{path.name}" for path in (ROOT / "kernels").iterdir() if path.is_file()}
    assert {"dptrain/py.typed", *kernels} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]


def build(what: str, out: Path, tmp_path: Path) -> Path:
    """Build a distribution of a copy of the repository with the declared version of setuptools; return its file."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("this environment has no pip")
    tools = tmp_path / "tools"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tools), "setuptools>=77"]
    if subprocess.run(command, capture_output=True, timeout=180).returncode:
        pytest.skip("no package registry to get setuptools from")
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
    code = f"import setuptools.build_meta as b; b.build_{what}({str(out)!r})"
    environment = {**os.environ, "PYTHONPATH": str(tools)}
    built = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=environment, capture_output=True, text=True, timeout=180
    )
    assert built.returncode == 0, built.stderr
    (found,) = out.iterdir()
    return found


def test_source_distribution_holds_what_belongs_to_the_repository_and_no_caches(tmp_path):
    (tmp_path / "out").mkdir()
    with tarfile.open(build("sdist", tmp_path / "out", tmp_path)) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in (ROOT / room).rglob("*")
        if path.is_file() and not {"__pycache__", ".pytest_cache"} & set(path.parts) and path.suffix != ".pyc"
    }
    assert files - names == set()
    assert {"CHANGELOG.md", "LICENSE", "README.md", "pyproject.toml"} <= names
    unwanted = ("__pycache__", ".pyc", "runs/", ".git/")
    assert [name for name in names if any(word in name for word in unwanted)] == []


def test_an_editable_install_is_found_from_the_folder_above_a_clone_named_dptrain(tmp_path):
    """The clone's own folder is a package without __init__.py there, which anything on the path must beat."""
    (tmp_path / "out").mkdir()
    with zipfile.ZipFile(build("editable", tmp_path / "out", tmp_path)) as wheel:
        wheel.extractall(tmp_path / "site")
    code = f"import site; site.addsitedir({str(tmp_path / 'site')!r})\n"
    code += "import importlib.util; print(importlib.util.find_spec('dptrain').origin)"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-S", "-c", code]  # without what this environment has installed
    for place in (tmp_path / "clone", tmp_path):
        found = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=60)
        assert found.stdout.strip() == str(tmp_path / "clone" / "dptrain" / "dptrain" / "__init__.py"), found.stderr
