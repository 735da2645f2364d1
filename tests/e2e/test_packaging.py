"""What a wheel holds."""

import importlib.util
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT


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
    assert {"dptrain/py.typed", "dptrain/_kernels/README.md"} <= names
    assert not [name for name in names if name.startswith(("tests", "benchmarks"))]
