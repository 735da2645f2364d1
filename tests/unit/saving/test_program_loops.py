"""Loops in exported programs stay loops, with the numbers of the model; a hostile body is refused in a line."""

import copy
import itertools
import json
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain import layers, ops
from dptrain.backend.cpu.compile import compiler
from dptrain.errors import ConfigError, DataError
from dptrain.program.body import has_body, with_steps
from dptrain.program.program import Program
from dptrain.program.steps import unrolled
from dptrain.saving import program as programs
from dptrain.saving import state
from tests.programs.check import by_numpy, compiled, not_optimized
from tests.programs.draw import program as drawn
from tests.programs.draw import seeds_of
from tests.programs.files import FORMAT, wrong_from_file
from tests.sample import examples, sample
from tests.unit.saving.loops import LOOPS, RECURRENT, RNG, STEPS, WIDTH, Own, X, sequential


def loaded(path: Any) -> tuple[Program, Any]:
    """Return the program in a file, and the function that it is."""
    exported = dp.saving.load_program(path, device="cpu")
    return exported._stored.program(3), exported


@pytest.mark.parametrize("name", [*LOOPS, *RECURRENT])
def test_loops_have_the_bits_of_predict(tmp_path, name):
    model = sequential([Own(LOOPS[name])] if name in LOOPS else RECURRENT[name]())
    model.compile(device="cpu")
    x = X * (np.arange(STEPS) % 3 > 0)[:, None] if name == "masks" else X
    before = {variable: variable.numpy() for variable in model.variables}
    model.predict(x, verbose=0)
    for variable, value in before.items():
        variable.assign(value)
    model.export(tmp_path / "program")
    program, function = loaded(tmp_path / "program")
    assert any(map(has_body, program.tensors))
    for _ in range(2):  # a program changes its variables, too
        np.testing.assert_array_equal(function(x), model.predict(x, verbose=0))


def test_a_file_is_as_long_for_many_steps_as_for_few(tmp_path):
    def size(steps):
        model = sequential([layers.LSTM(4)], steps)
        model.export(tmp_path / "program", overwrite=True)
        return os.path.getsize(tmp_path / "program"), len(list(with_steps(loaded(tmp_path / "program")[0].tensors)))

    (short, tensors), (long, same_tensors) = size(4), size(2000)
    assert long - short < 100
    assert tensors == same_tensors


@pytest.mark.parametrize(("steps", "depth"), [(programs._MAX_STEPS + 1, 1), (2, programs._MAX_NESTED + 1)])
def test_what_a_file_may_not_hold_is_not_exported(tmp_path, steps, depth):
    def deeper(value, level):
        inner = (lambda n, a: deeper(a, level + 1)) if level < depth else (lambda n, a: ops.tanh(a))
        return ops.scan(lambda c, _: (inner(0, c), None), value, length=steps)[0]

    model = sequential([Own(lambda layer, x, steps: deeper(x, 1))])
    with pytest.raises(
        ConfigError, match=r"not supported: a loop of more than 16,777,216 steps, .* or within 8 others"
    ):
        model.export(tmp_path / "program")


# Random programs

# Programs with loops, some hundred in a long run; more of them by DPTRAIN_PROGRAMS.
SEEDS = seeds_of("loops", int(os.environ.get("DPTRAIN_PROGRAMS", "4")) * 75)


@pytest.mark.parametrize("part", sample(range(25), 25))
def test_random_programs(part):
    for seed in SEEDS[part::25]:
        case = drawn(seed)
        if not case.trace().shape_specialised:
            ways = {"C++": compiled()} if compiler() else {}
            assert not (fault := not_optimized(lambda: wrong_from_file(case, ways))), f"{fault}\n{case}"  # noqa: B023


# Hostile files


def scan_document(steps: int = 4) -> dict[str, Any]:
    """Return what a file says of `c, y = tanh(c + w x), c * x` over slices x."""
    body_nodes = [
        {"op": "multiply", "inputs": [1, 2], "attributes": {}},
        {"op": "add", "inputs": [0, 3], "attributes": {}},
        {"op": "tanh", "inputs": [4], "attributes": {}},
        {"op": "multiply", "inputs": [0, 1], "attributes": {}},
    ]
    loop = {
        "op": "scan",
        "inputs": [0, 1, 2],
        "attributes": {"length": steps, "reverse": False},
        "body": {"carries": 1, "slices": 1, "nodes": body_nodes, "results": [5, 6]},
    }
    rows = {"rows": 1}
    nodes = [
        {"input": "c", "shape": [rows, WIDTH], "dtype": "float32"},
        {"input": "x", "shape": [4, rows, WIDTH], "dtype": "float32"},
        {"input": "w", "shape": [WIDTH], "dtype": "float32"},
        loop,
    ]
    return {"nodes": nodes, "results": {"c": 3, "y": 4}, "updates": {}, "dtype": "float32", "inputs": "c"}


def test_a_branch_without_a_condition_is_refused() -> None:
    contents = scan_document(1)
    contents["nodes"][0] = {"input": "c", "shape": [], "dtype": "bool"}
    contents["nodes"][1]["shape"] = [1, WIDTH]
    branch = contents["nodes"][3]
    branch.update(op="cond", inputs=[1, 0, 2])
    branch["body"] = {"carries": 0, "slices": 1, "nodes": [{"op": "multiply", "inputs": [0, 2], "attributes": {}}]}
    branch["body"]["results"] = [3]
    contents["results"] = {"y": 3}
    assert read(contents).program(2).outputs["y"].shape == (1, WIDTH)
    damages: list[dict[str, Any]] = [
        {"inputs": [1]},
        {"inputs": [1, 2, 0]},
        {"attributes": {"length": 2, "reverse": False}},
        {"body": branch["body"] | {"carries": 1, "slices": 0, "results": [0]}},
    ]
    for damage in damages:
        damaged = copy.deepcopy(contents)
        damaged["nodes"][3].update(damage)
        with pytest.raises(DataError, match=r"^file: damaged: a branch of"):
            read(damaged)


def read(contents: dict[str, Any]) -> programs.StoredProgram:
    return programs.decode(state.pack({}, contents, FORMAT), "file")


def loop_of(contents: dict[str, Any]) -> Any:
    return next(node for node in contents["nodes"] if "body" in node)


def body_of(contents: dict[str, Any]) -> Any:
    return loop_of(contents)["body"]


def test_a_file_written_by_hand():
    program = read(scan_document()).program(2)
    c, x = RNG.normal(size=(2, WIDTH)).astype(np.float32), RNG.normal(size=(4, 2, WIDTH)).astype(np.float32)
    w = RNG.normal(size=WIDTH).astype(np.float32)
    executable = by_numpy(program, {"c": c, "x": x, "w": w})
    executable.run()
    for number, xt in enumerate(x):
        np.testing.assert_allclose(executable.outputs["y"][number], c * xt, rtol=1e-6)
        c = np.tanh(c + w * xt)
    np.testing.assert_allclose(executable.outputs["c"], c, rtol=1e-6)


def nest(contents: dict[str, Any], depth: int, steps: int = 1) -> None:
    """Put loops around the body's last node, which all have several values."""
    body = body_of(contents)
    for _ in range(depth):
        inner = copy.deepcopy(body)
        body["nodes"] = [
            {"op": "scan", "inputs": [0, 1, 2], "attributes": {"length": steps, "reverse": True}, "body": inner},
            *({"op": "tanh", "inputs": [3 + number % 2], "attributes": {}} for number in range(4)),
        ]
        inner |= {"carries": 1, "slices": 0, "results": [inner["results"][0]] + [0] * 3}
        body["results"] = [3, 4]


def without_slices(contents: dict[str, Any], steps: int, width: int = WIDTH) -> None:
    """Let the loop capture x, and have any number of steps."""
    for node, rows in zip(contents["nodes"], ([{"rows": 1}], [{"rows": 1}], []), strict=False):
        node.update(shape=[*rows, width])
    body_of(contents).update(slices=0)
    loop_of(contents)["attributes"].update(length=steps)


HOSTILE = [
    (
        lambda d: body_of(d)["nodes"][0].update(inputs=[1, 99]),
        r"op 'multiply' has inputs \[1, 99\], expected numbers of 3 tensors",
    ),
    (
        lambda d: body_of(d)["nodes"][0].update(inputs=[1, -1]),
        r"op 'multiply' has inputs \[1, -1\], expected numbers of 3 tensors",
    ),
    (
        lambda d: body_of(d)["nodes"][0].update(inputs=[1, 3]),
        r"has inputs \[1, 3\], expected numbers of 3 tensors",
    ),  # itself
    (
        lambda d: body_of(d)["nodes"][0].update(inputs=[1, 5]),
        r"has inputs \[1, 5\], expected numbers of 3 tensors",
    ),  # what follows from it
    (lambda d: body_of(d).update(results=[5, 7]), r"a loop's body has results \[5, 7\], expected numbers of 7 tensors"),
    (lambda d: body_of(d).update(results=[True, 6]), r"a loop's body has results \[True, 6\]"),
    (lambda d: body_of(d).update(results=[]), "a loop changes its carries"),
    (lambda d: body_of(d).update(results=3), "damaged"),
    (lambda d: body_of(d).update(carries=2), "a loop changes its carries|over"),
    (lambda d: body_of(d).update(carries=-1), "a loop with -1 carries and 1 slices, but 3 inputs"),
    (lambda d: body_of(d).update(carries=1.0), r"a loop with 1\.0 carries and 1 slices, but 3 inputs"),
    (lambda d: body_of(d).update(slices=9), "a loop with 1 carries and 9 slices, but 3 inputs"),
    (lambda d: body_of(d).update(slices=10**30), "a loop with 1 carries and 1000.* slices, but 3 inputs"),
    (lambda d: body_of(d).update(slices=2), "a loop of 4 steps over"),
    (lambda d: body_of(d).update(nodes={}), "a loop's body has results"),
    (lambda d: body_of(d).update(nodes=[7]), "damaged"),
    (
        lambda d: body_of(d)["nodes"].append({"input": "z", "shape": [], "dtype": "float32"}),
        "{'input': 'z'.*} in the body of a loop",
    ),
    (lambda d: body_of(d)["nodes"].append({"variable": "z"}), "damaged: {'variable': 'z'} in the body"),
    (lambda d: body_of(d)["nodes"].append({"constant": "z"}), "damaged"),
    (
        lambda d: body_of(d)["nodes"].append({"op": "system", "inputs": []}),
        "op 'system', which this version does not have",
    ),
    (lambda d: loop_of(d).update(body=None), "damaged"),
    (lambda d: loop_of(d).update(op="add"), "a loop 'add' with"),
    (lambda d: loop_of(d).pop("body"), "op 'scan', which this version does not have"),
    (lambda d: loop_of(d).update(inputs=[0, 1, 3]), r"a loop has inputs \[0, 1, 3\], expected numbers of 3 tensors"),
    (lambda d: loop_of(d).update(inputs=[2, 1, 0]), "a loop changes its carries"),
    (lambda d: loop_of(d)["attributes"].update(length=-1), "a loop 'scan' with {'length': -1"),
    (lambda d: loop_of(d)["attributes"].update(length=5), r"a loop of 5 steps over"),
    (lambda d: loop_of(d)["attributes"].update(length={"rows": 2}), "a loop 'scan' with {'length': {'rows': 2}"),
    (lambda d: loop_of(d)["attributes"].update(reverse=1), "a loop 'scan' with"),
    (lambda d: loop_of(d)["attributes"].update(more=1), "a loop 'scan' with"),
    (lambda d: loop_of(d)["attributes"].update(length=10**30), "a loop 'scan' with {'length': 1000"),
    (lambda d: loop_of(d)["attributes"].update(length=10**9), "a loop of more than 16,777,216 steps"),
    (
        lambda d: without_slices(d, 1 << 24, 64),
        r"'scan' has shape \(16777216, 2, 64\) for two rows, which is too large",
    ),
    (lambda d: nest(d, 8), "or within 8 others"),
    (lambda d: nest(d, 4, 1000), "a loop of more than 16,777,216 steps"),
    (lambda d: nest(d, 60), "or within 8 others"),
    (lambda d: d["nodes"][1].update(shape=[{"rows": 4}, WIDTH]), "a loop of 4 steps over"),
    (lambda d: d["nodes"][0].update(shape=[2, WIDTH]), "a loop changes its carries"),  # two rows only
    (
        lambda d: (
            body_of(d)["nodes"].append({"op": "getitem", "inputs": [0], "attributes": {"key": [[0, 9, 1], [0, 1, 1]]}})
            or body_of(d).update(results=[5, 7])
        ),
        "'getitem' returns shape",
    ),
]


def while_document() -> dict[str, Any]:
    """Return what a file says of `while n < 3: n, y = n + 1, y * 2`."""
    body_nodes = [
        {"constant": "one"},
        {"op": "add", "inputs": [1, 4], "attributes": {}},
        {"constant": "three"},
        {"op": "less", "inputs": [5, 6], "attributes": {}},
        {"op": "add", "inputs": [2, 2], "attributes": {}},
        {"op": "add", "inputs": [2, 3], "attributes": {}},
    ]
    body = {"carries": 3, "slices": 0, "nodes": body_nodes, "results": [7, 5, 8]}
    nodes = [
        {"input": "y", "shape": [{"rows": 1}, WIDTH], "dtype": "float32"},
        {"constant": "goes on"},
        {"constant": "one"},
        {"op": "while", "inputs": [1, 2, 0, 0], "attributes": {}, "body": body},
    ]
    return {"nodes": nodes, "results": {"n": 4, "y": 5}, "updates": {}, "dtype": "float32", "inputs": "y"}


def read_while(contents: dict[str, Any]) -> programs.StoredProgram:
    numbers = {"one": np.array(1, np.int32), "three": np.array(3, np.int32), "goes on": np.array(True)}
    return programs.decode(state.pack(numbers, contents, FORMAT), "file")


def test_a_loop_of_unknown_length_written_by_hand():
    program, y = read_while(while_document()).program(2), RNG.normal(size=(2, WIDTH)).astype(np.float32)
    executable = by_numpy(program, {"y": y})
    executable.run()
    assert executable.outputs["n"] == 3
    np.testing.assert_array_equal(executable.outputs["y"], 4 * y)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: loop_of(d)["attributes"].update(length=3), "a loop 'while' with {'length': 3}"),
        (lambda d: body_of(d).update(slices=1), "a loop with 3 carries and 1 slices, but 4 inputs"),
        (lambda d: body_of(d).update(results=[7, 5, 8, 8]), "damaged: a while_loop with results"),
        (lambda d: loop_of(d).update(inputs=[2, 2, 0, 0]) or body_of(d).update(results=[5, 5, 8]), "a while_loop with"),
        (lambda d: body_of(d).update(results=[5, 5, 8]), "a loop changes its carries"),
        (lambda d: body_of(d).update(carries=0, results=[]), "a while_loop with results"),
    ],
)
def test_a_hostile_loop_of_unknown_length_is_refused(change, message):
    contents = while_document()
    change(contents)
    with pytest.raises(DataError, match=message) as caught:
        read_while(contents)
    assert "\n" not in str(caught.value)


def endless(contents: dict[str, Any]) -> dict[str, Any]:
    """Let the loop go on for ever: its condition is the constant true."""
    body_of(contents)["nodes"].append({"constant": "goes on"})
    body_of(contents)["results"][0] = 10
    return contents


def around(contents: dict[str, Any], op: str, length: int | None) -> dict[str, Any]:
    """Put the loop into another one, of the same carries, or into a branch, whose first capture is its condition."""
    is_branch = op == "cond"
    inner = {**loop_of(contents), "inputs": [1, 2, 3, 4] if is_branch else [0, 1, 2, 3]}
    body = {"slices": 0, "nodes": [inner]}
    body |= {"carries": 0, "results": [5, 6, 7]} if is_branch else {"carries": 3, "results": [4, 5, 6]}
    attributes = {} if length is None else {"length": length, "reverse": False}
    inputs = [1, 1, 2, 0, 0] if is_branch else [1, 2, 0, 0]
    contents["nodes"][3] = {"op": op, "inputs": inputs, "attributes": attributes, "body": body}
    return contents


def endless_outside() -> dict[str, Any]:
    """Return a loop without an end around one that takes three steps at first, and none later."""
    contents = around(while_document(), "while", None)
    body_of(contents)["nodes"].append({"constant": "goes on"})
    body_of(contents)["results"][0] = 7
    return contents


ENDLESS = {
    "alone": lambda: endless(while_document()),
    "in a while": lambda: around(endless(while_document()), "while", None),
    "around a while": endless_outside,
    "in a scan": lambda: around(endless(while_document()), "scan", 3),
    "in a branch": lambda: around(endless(while_document()), "cond", 1),
}


@pytest.mark.parametrize("case", ENDLESS)
@pytest.mark.parametrize("make", [by_numpy, compiled()], ids=["NumPy", "C++"])
def test_loops_of_unknown_length_have_an_end(monkeypatch, case, make):
    if make is not by_numpy and compiler() is None:
        pytest.skip("no compiler")
    monkeypatch.setattr(programs, "_MAX_STEPS", 50)
    stored, y = read_while(ENDLESS[case]()), RNG.normal(size=(2, WIDTH)).astype(np.float32)
    executable = make(stored.program(2), {"y": y})
    with np.errstate(over="ignore"):
        executable.run()
    steps = int(executable.outputs[programs.STEPS])
    assert 50 < steps <= 52
    with pytest.raises(DataError, match="file: loops of unknown length take more than 50 steps"):
        stored.require_ended(steps)


def steps_of_loops(lengths: Sequence[int | None]) -> int:
    """Return the steps that loops count, from the outermost on; in them is one of unknown length, which takes two.

    Those of unknown length take one step each, when it has ended, and count the steps of known ones in theirs.
    """

    def known(inner: Sequence[int | None]) -> int:
        length = inner[0] if inner else None
        return 0 if length is None else length * (1 + known(inner[1:]))

    return 2 + sum(1 + known(lengths[place + 1 :]) for place, length in enumerate(lengths) if length is None)


@pytest.mark.parametrize(
    "lengths", [lengths for depth in range(4) for lengths in itertools.product((None, 5), repeat=depth)], ids=str
)
def test_steps_of_loops_in_loops_count(lengths):
    contents = while_document()
    for length in reversed(lengths):
        contents = around(copy.deepcopy(contents), "while" if length is None else "scan", length)
    executable = by_numpy(read_while(contents).program(2), {"y": np.ones((2, WIDTH), np.float32)})
    executable.run()
    assert executable.outputs[programs.STEPS] == steps_of_loops(lengths)


def test_a_served_program_that_does_not_end_is_an_error(tmp_path, monkeypatch):
    model = sequential([Own(LOOPS["unbounded"])])
    model.compile(device="cpu")
    model.export(tmp_path / "program")
    _, function = loaded(tmp_path / "program")
    np.testing.assert_array_equal(function(X), model.predict(X, verbose=0))
    monkeypatch.setattr(programs, "_MAX_STEPS", 1)
    _, function = loaded(tmp_path / "program")
    with pytest.raises(DataError, match="program: loops of unknown length take more than 1 steps"):
        function(X)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_body_is_refused(number):
    change, message = HOSTILE[number]
    contents = scan_document()
    change(contents)
    with pytest.raises(DataError, match=message) as caught:
        read(contents)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("file")


def test_a_file_of_many_levels_is_refused():
    text = '{"nodes": [' + '{"op": "scan", "body": {"nodes": [' * 50_000 + "]}}" * 50_000 + "]}"
    content = state.pack({}, {"nodes": "PLACE"}, FORMAT)
    description = state.unpack(content, "file", FORMAT, "")[0]
    assert description == {"nodes": "PLACE"}
    with pytest.raises((RecursionError, ValueError)):
        json.loads(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state.json, "dumps", lambda *_, **__: text)
        content = state.pack({}, {}, FORMAT)
    with pytest.raises(DataError, match=r"file: damaged \(.*") as caught:
        programs.decode(content, "file")
    assert "\n" not in str(caught.value)


def test_loops_of_several_values_in_one_another_take_no_exponential_time():
    contents = scan_document()
    nest(contents, 7)
    program = read(contents).program(2)
    executable = compiled()(program, {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in program.inputs.items()})
    executable.run()


def test_a_loop_is_not_unrolled_into_any_number_of_ops():
    contents = scan_document()
    without_slices(contents, 1 << 20)
    body_of(contents).update(results=[5])
    del contents["results"]["y"]
    program = read(contents).program(2)
    with pytest.raises(ConfigError, match=r"not supported: unrolling a loop into 2,097,152 ops, at most 262,144"):
        unrolled(program)


values = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 9) | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rows", "op", "body"]), inner, max_size=2)
    ),
    max_leaves=5,
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    """Yield the paths of all parts of a document."""
    parts = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


NESTED = scan_document()
nest(NESTED, 2, 3)
PLACES = [place for place in places(NESTED) if place[0] in ("nodes", "results", "updates")]


@settings(max_examples=examples(400), deadline=None)
@given(changes=st.lists(st.tuples(st.sampled_from(PLACES), values), min_size=1, max_size=3))
def test_any_change_is_refused_in_a_line_or_makes_another_program(changes):
    contents = copy.deepcopy(NESTED)
    for (*outer, last), value in changes:
        part: Any = contents
        try:
            for key in outer:
                part = part[key]
            part[last] = value
        except (TypeError, LookupError):
            continue
    try:
        program = read(contents).program(2)
    except DataError as refusal:
        return None if "\n" not in str(refusal) else pytest.fail(str(refusal))
    inputs = {name: np.zeros(leaf.shape, leaf.dtype) for name, leaf in program.inputs.items()}
    by_numpy(program, inputs).run()
