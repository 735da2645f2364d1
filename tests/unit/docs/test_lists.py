"""What pages list is all that there is: environment variables, exit codes, examples, entries of the reference."""

import importlib.util
import re
import sys

import pytest

import dptrain as dp
from dptrain.cli.main import COMMANDS
from dptrain.errors import ExitCode
from tests.conftest import ROOT

ENVIRONMENT = (ROOT / "docs" / "environment.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def reference():
    """The module that writes the reference."""
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def test_every_variable_is_listed():
    sources = "\n".join(path.read_text(encoding="utf-8") for path in (ROOT / "dptrain").rglob("*.py"))
    used = set(re.findall(r"[\"'`$](DPTRAIN_[A-Z_]+)", sources))
    listed = set(re.findall(r"`(DPTRAIN_[A-Z_]+)`", ENVIRONMENT))
    assert len(used) > 8
    assert listed == used


def test_every_exit_code_is_listed():
    listed = [int(code) for code in re.findall(r"^\| (\d+) \|", ENVIRONMENT, re.MULTILINE)]
    assert listed == [int(code) for code in ExitCode]


def test_every_example_is_in_the_gallery():
    gallery = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[([\w.]+)\]\(([\w.]+)\) \|", gallery, re.MULTILINE)
    assert all(name == target for name, target in listed)
    assert sorted(name for name, _ in listed) == sorted(path.name for path in (ROOT / "examples").glob("*.py"))


def test_the_reference_has_every_command_and_its_options(reference):
    page = reference.command_line()
    assert re.findall(r"^## (\w+)$", page, re.MULTILINE) == list(COMMANDS)
    (row,) = re.findall(r"^\| `--learning-rate [^`]*` \| .*$", page, re.MULTILINE)
    assert "step size" in row
    assert "| `--grid " in page.partition("## sweep")[2]
    assert "--restarts N" in page.partition("## launch")[2]


def test_the_reference_has_every_public_name(reference):
    """Of modules with a list of their names; abstract helpers of typing are none."""
    for name in ("layers", "losses", "metrics", "optimizers", "callbacks"):
        page = reference.module_page(name)
        entries = re.findall(r"^## (\w+)$", page, re.MULTILINE)
        public = [each for each in getattr(dp, name).__all__ if callable(getattr(getattr(dp, name), each))]
        assert len(entries) > 15
        assert set(public) - set(entries) <= {"Logs", "StepLogs"}, name


def test_an_entry_of_the_reference(reference):
    entry = reference.module_page("layers").partition("\n## Dense\n")[2].partition("\n## ")[0]
    assert "dptrain.layers.Dense(units, activation=None, use_bias=True, kernel_initializer='glorot_uniform'" in entry
    assert "y = activation(x @ kernel + bias), x of shape (rows, ..., inputs)" in entry
    assert "**Args**\n\n- `units`: outputs, at least 1." in entry
    assert "As in [`Conv1D`](#conv1d): `enable_lora`" in entry, "what both have from one base is described once"
    ops = reference.module_page("ops")
    assert "dptrain.ops.relu(x)" in ops, "an op's arguments are those of its NumPy function"
    assert "## absolute\n\nAnother name of [`abs`](#abs)." in ops


@pytest.mark.parametrize(
    ("docstring", "markdown"),
    [
        ("a * b_c <d> [0] `x_y * z`", r"a \* b\_c &lt;d> \[0\] `x_y * z`"),
        ("Text.\n\nArgs:\n    x: one,\n        more.\n    y: two.", "**Args**\n\n- `x`: one,\n    more.\n- `y`: two."),
        ("Text.\n\nReturns:\n    A result: of two\n    lines.", "**Returns**\n\nA result: of two\nlines."),
    ],
)
def test_docstrings_as_markdown(reference, docstring, markdown):
    assert markdown in reference._markdown(docstring)
