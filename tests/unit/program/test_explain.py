"""A program as text, and the example of docs/program.md."""

import contextlib
import io
import re

import numpy as np

from dptrain import ops
from dptrain.program.explain import explain
from dptrain.program.program import trace
from dptrain.program.shapes import Rows
from tests.conftest import ROOT


def test_the_example_of_the_documentation():
    """It runs as printed, and prints what stands there."""
    text = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    source, shown = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/program.md", "exec"), {})
    lines = printed.getvalue().splitlines()
    assert len(lines) == 1 + 50 + 4 + 1
    for line in shown.splitlines():
        assert line == "..." or line.rstrip() in lines, line


def test_what_is_counted():
    def step(x):
        return {"y": ops.sum(ops.reshape(ops.matmul(x, np.ones((3, 5))), (-1,)))}

    lines = explain(trace(step, {"x": ((Rows(4), 3), np.float64)})).splitlines()
    product, view, total, output, sums = (line.split() for line in lines[1:])
    assert product[-2:] == [str(2 * 4 * 3 * 5), str(4 * 5 * 8)]
    assert product[2:6] == ["constant", "(3,", "5))", "(B,"]
    assert view[-2:] == ["0", "0"]
    assert view[2:4] == ["(5", "B)"]
    assert total[-2:] == ["20", "8"]
    assert output == ["y", "=", "%3"]
    assert " ".join(sums) == "3 ops, 140 operations, 168 bytes written"
