"""A program as text, and the example of docs/program.md."""

import contextlib
import io
import re

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dptrain import ops
from dptrain.program.dims import Dim
from dptrain.program.explain import explain, grouped, wrapped, wrapped_code
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.conftest import ROOT


def test_the_example_of_the_documentation():
    """It runs as printed, and prints what stands there."""
    text = (ROOT / "docs" / "program.md").read_text(encoding="utf-8")
    source, expected = re.findall(r"```(?:python|text)\n(.*?)```", text, re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(source, "docs/program.md", "exec"), {})
    lines = printed.getvalue().splitlines()
    assert len(lines) == 4 * 3 + 50 + 4 + 1  # a heading, a header and an empty line a group
    for line in expected.splitlines():
        assert line == "..." or line.rstrip() in lines, line


def test_what_is_counted():
    def step(x):
        return {"y": ops.sum(ops.reshape(ops.matmul(x, np.ones((3, 5))), (-1,)))}

    lines = explain(trace(step, {"x": ((Dim.rows(4), 3), np.float64)})).splitlines()
    product, view, total, output, sums = (line.split() for line in lines[1:])
    assert product[-2:] == [str(2 * 4 * 3 * 5), str(4 * 5 * 8)]
    assert product[2:6] == ["constant", "(3,", "5))", "(B,"]
    assert view[-2:] == ["0", "0"]
    assert view[2:4] == ["(5", "B)"]
    assert total[-2:] == ["20", "8"]
    assert output == ["y", "=", "%3"]
    assert " ".join(sums) == "3 ops, 140 operations, 168 bytes written"


# Groups


def groups_of(step) -> dict[str, str]:
    """Return the names of ops by group."""
    program = place(trace(step, {"x": ((Dim.rows(4), 3), np.float64)}))
    groups = grouped(program)
    assert sorted(id(tensor) for members in groups.values() for tensor in members) == sorted(
        id(tensor) for tensor in program.tensors if tensor.op is not None
    )
    return {name: " ".join(tensor.op.name for tensor in members) for name, members in groups.items()}


def test_branches_are_named():
    def step(x):
        loop = ops.cond(ops.sum(x) > 0, lambda: ops.sin(x), lambda: ops.scan(lambda c, _: (c, c), x, length=2)[0])
        return {"y": loop + ops.scan(lambda c, _: (ops.sin(c), None), x, length=2)[0]}

    names = [line.split()[1].split("(")[0] for line in explain(trace(step, {"x": ((3,), np.float64)})).splitlines()[1:]]
    assert (names.count("branch"), names.count("scan")) == (2, 1)


def test_what_trains_nothing_is_one_group():
    assert groups_of(lambda x: {"y": ops.relu(x)}) == {"forward": "relu"}


def test_a_step_of_a_user_s_own():
    w = Variable(np.ones((3, 2)), "w")

    def step(x):
        loss = ops.sum(ops.square(x @ w))
        loss.backward()
        w.assign(w - 0.1 * w.value.grad)
        return {"loss": loss}

    groups = groups_of(step)
    assert list(groups) == ["forward", "backward", "update", "messages"]
    assert groups["forward"] == "batch_matmul square reduce_sum"
    assert groups["backward"].endswith("batch_matmul")
    assert (groups["update"], groups["messages"]) == ("multiply subtract", "all_reduce all_reduce")


def test_a_table_is_as_wide_as_a_terminal():
    names = [f"a_rather_long_name_of_an_input_{n}" for n in range(5)]
    inputs = {name: ((Dim.rows(4), 3), np.float64) for name in [*names, "x" * 150]}
    text = explain(trace(lambda *xs: {"y" * 120: ops.concatenate(xs, 1)}, inputs))
    assert max(map(len, text.splitlines())) == 100
    assert text.count("a_rather_long_name_of_an_input_3,") == 1


def test_text_is_broken_after_commas():
    assert wrapped("f(%1, %2)", 20) == ["f(%1, %2)"]
    assert wrapped("f(first, second, third)", 12) == ["f(first,", "  second,", "  third)"]
    assert wrapped("x" * 30, 11) == ["xxx...xxxxx"]


def test_code_is_broken_between_words():
    call = "    f(" + ", ".join(f"argument_{n} + 1" for n in range(8)) + ");"
    first, second = wrapped_code(call).splitlines()
    assert (len(first) <= 100, first[-1], second[:8]) == (True, ",", " " * 8)
    assert " ".join(f"{first} {second}".split()) == call.strip()
    assert wrapped_code(f"short;\n{'x' * 120};") == f"short;\n{'x' * 120};"


def test_text_in_code_stays_in_one_piece():
    text = '"' + "a, b; " * 5 + '\\" c"'
    lines = wrapped_code(f"{'word ' * 16}{text} + {text};").splitlines()
    assert [line.count(text) for line in lines if '"' in line] == [2]


def test_comments_and_directives_stay_what_they_are():
    words = "word " * 30
    assert all(line.startswith("  // word") for line in wrapped_code(f"  // {words}").splitlines())
    comment, code = wrapped_code(f"  {'x + ' * 20}x;  // why it is so long").splitlines()
    assert (comment, code) == ("  // why it is so long", f"  {'x + ' * 20}x;")
    first, second = wrapped_code(f"#define f(x) {words}").splitlines()
    assert first.endswith(" \\")
    assert second.startswith("    word")


@given(st.text("ab ,;(){}", min_size=80, max_size=300))
def test_no_code_is_lost(code):
    assert "".join(wrapped_code(code).split()) == "".join(code.split())
