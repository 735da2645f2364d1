"""Schedules as text, and the example of docs/program.md with the texts of both generators."""

import contextlib
import io
import re

import pytest

from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.policy import POLICY
from dptrain.errors import ConfigError
from dptrain.program.codegen.fuse import fuse as fuse_for_cpu
from dptrain.program.explain import names_of
from dptrain.program.schedule.fuse import fuse
from dptrain.program.schedule.printed import printed
from dptrain.program.sharding.placement import place
from tests.conftest import ROOT
from tests.programs.draw import program as drawn
from tests.programs.table import TABLE


def test_the_example_of_the_documentation():
    """It prints what stands there, and both generators write what stands there."""
    page = (ROOT / "docs" / "program.md").read_text(encoding="utf-8").partition("## A nest and its texts\n")[2]
    (source,), (nests,), (cuda, cpu) = (
        re.findall(rf"```{language}\n(.*?)```", page.partition("\n## ")[0], re.DOTALL)
        for language in ("python", "text", "cpp")
    )
    names, output = {}, io.StringIO()
    with contextlib.redirect_stdout(output):
        exec(compile(source, "docs/program.md", "exec"), names)
    assert output.getvalue() == nests
    assert cuda in Composition(names["program"]).source()
    assert cpu in generate(fuse_for_cpu(place(names["program"]))).source


@pytest.mark.parametrize(
    "name", ["training_on_gathered_rows, float32", "images, float64, n=5", "random_numbers", "pooling"]
)
def test_each_statement_is_printed(name):
    program = TABLE[name].trace()
    schedule = fuse(program, POLICY)
    text, names = printed(schedule, names_of(program)), names_of(program)
    assert len(text.split("\n\n")) == len(schedule.nests)
    stored = [tensor for nest in schedule.nests for tensor, position in nest.writes.items() if position is not None]
    assert stored
    for tensor in stored:
        assert f" {names[tensor]}[" in text, tensor


def test_any_program_is_printed():
    for seed in range(40):
        program = drawn(seed).trace()
        with contextlib.suppress(ConfigError):  # an op that a GPU has lowered before
            assert printed(fuse(program, POLICY), names_of(program)).startswith("level ")
