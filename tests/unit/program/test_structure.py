"""Structures: equal for programs that differ in variables and seeds alone, and for no others."""

import dataclasses
import gc
import itertools
import weakref

import numpy as np
import pytest

from dptrain import ops, optimizers, random
from dptrain.backend.cpu import compiled
from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cpu.compiled import CompiledExecutable, lowered
from dptrain.ops.random import random_bits
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.kernels import Call
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.passes import comparable
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.steps import without_ranks
from dptrain.program.structure import CONSTANTS, structure_of
from dptrain.program.tensor import Variable, placeholder
from dptrain.random import Purpose
from tests.programs.check import compiled as by_compiled
from tests.programs.check import expected, not_optimized, run_alone
from tests.programs.corpus import CORPUS
from tests.programs.draw import program as drawn
from tests.programs.table import LOOPS
from tests.sample import sample

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
PROGRAMS, PARTS = 24, 3


@pytest.fixture(autouse=True)
def _nothing_is_known(monkeypatch):
    monkeypatch.setattr(compiled, "_LOWERED", type(compiled._LOWERED)())


def program(
    shape=(4,),
    rows=6,
    dtype="float32",
    slope=0.0,
    constant=(1.0, 2.0, 3.0, 4.0),
    function=ops.exp,
    name="y",
    seeds=(1, 2),
    updates="wv",
    number=0,
    reverse=False,
    variables=None,
):
    """Return a small training step, of which a test changes one thing."""
    state = (
        {letter: Variable(np.full(shape, 2.0), letter, dtype=dtype) for letter in "wv"}
        if variables is None
        else variables
    )

    def step(x):
        y = ops.leaky_relu(x * state["w"] if not reverse else state["w"] * x, slope) + np.asarray(constant, dtype)
        for seed in seeds:
            generator = random.SeedGenerator(seed, number=number, purpose=Purpose.DROPOUT)
            y = y + ops.cast(random.uniform((x.shape[0], 4), seed=generator), dtype)
        for letter in updates:
            state[letter].assign(state[letter] * 0.5 + 1)
        return {name: function(y) * state["v"]}

    return trace(step, {"x": ((Dim.rows(rows), *shape), dtype)})


# Programs that differ from the first in one thing that the kernels or their code hold.
OTHERS = {
    "shape": {"shape": (1,)},
    "dtype": {"dtype": "float64"},
    "number": {"slope": 0.25},
    "sign of zero": {"slope": -0.0},
    "constant": {"constant": (1.0, 2.0, 3.0, 5.0)},
    "sign of a constant's zero": {"constant": (1.0, 2.0, 3.0, -0.0)},
    "sizes of a constant": {"constant": 1.0},
    "op": {"function": ops.tanh},
    "name": {"name": "z"},
    "equal seeds": {"seeds": (1, 1)},
    "one seed": {"seeds": (1,)},
    "stream": {"number": 1},
    "no update": {"updates": "w"},
    "order of updates": {"updates": "vw"},
    "order of operands": {"reverse": True},
}


def test_variables_seeds_and_rows_make_no_difference():
    first = structure_of(program())
    for other in (program(), program(seeds=(7, 9)), program(rows=11), program(seeds=(2, 1))):
        assert structure_of(other).key == first.key
    assert structure_of(program(seeds=(7, 9))).seeds == [7, 9]


@pytest.mark.parametrize("name", OTHERS)
def test_whatever_else_differs_does(name):
    changed, other = program(**OTHERS[name]), program()
    assert structure_of(changed).key != structure_of(other).key


def small(function, x=(3,), dtype="float32", y=(3,)):
    """Return the key of a step that is given two variables and two inputs."""
    variables = [Variable(np.zeros(3), letter) for letter in "wv"]
    return structure_of(trace(lambda x, y: function(x, y, *variables), {"x": (x, dtype), "y": (y, "float32")})).key


def assigning(w_new, v_new):
    """Return a step that reads two variables and gives them new values: x, its exponential, or none."""

    def step(x, y, w, v):
        total = x + w * v
        choice = {"sum": total, "exp": ops.exp(total)}
        for variable, new in ((w, w_new), (v, v_new)):
            if new:
                variable.assign(choice[new])
        return {"y": choice["exp"]}

    return step


def both(x):
    return x, ops.exp(x)


def reading(first):
    """Return a step that reads one of its variables first, which says their order in the state."""
    return lambda x, y, w, v: {"read": (w, v)[first].value, "y": w - v + x}


def test_what_is_alike_has_other_keys():
    keys = [
        small(lambda x, y, w, v: {"y": x * x}),
        small(lambda x, y, w, v: {"y": x * x}, dtype="float64"),
        small(lambda x, y, w, v: {"y": x * x}, x=(4,)),
        small(lambda x, y, w, v: {"y": x * x}, x=(Dim.rows(3),)),
        small(lambda x, y, w, v: {"y": x * x}, x=(Dim.rows(3, 2),)),
        small(lambda x, y, w, v: {"y": x * x}, x=(Dim.rows(3, 2, (1, 1)),)),
        small(lambda x, y, w, v: {"y": x * x}, y=(5,)),
        small(lambda x, y, w, v: {"y": x - y}),
        small(lambda x, y, w, v: {"y": y - x}),
        small(lambda x, y, w, v: dict(zip("ab", both(x * y), strict=True))),
        small(lambda x, y, w, v: dict(zip("ba", both(x * y), strict=True))),
        small(lambda x, y, w, v: dict(zip("ab", reversed(both(x * y)), strict=True))),
        small(lambda x, y, w, v: {"y": x + np.ones(3, np.float32)}),
        small(lambda x, y, w, v: {"y": x + np.ones((1, 3), np.float32)}),
        small(reading(0)),
        small(reading(1)),
        small(assigning("sum", "exp")),
        small(assigning("exp", "sum")),
        small(assigning("sum", "")),
        small(assigning("", "sum")),
    ]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    ("value", "other"), [(0.0, -0.0), (np.float32(0.0), np.float32(-0.0)), (1, 1.0), (1, True), ((0.0,), [-0.0])]
)
def test_attributes_are_compared_bit_by_bit(value, other):
    assert comparable(value) != comparable(other)
    assert comparable(value) == comparable(value)


def test_programs_of_one_size_differ_by_it():
    def sized(rows):
        return trace(lambda x: {"y": x[: int(x.shape[0]) // 4]}, {"x": ((Dim.rows(rows), 4), "float32")})

    assert sized(8).shape_specialised
    assert structure_of(sized(8)).key == structure_of(sized(8)).key
    assert structure_of(sized(8)).key != structure_of(sized(9)).key  # of which both take two rows


def test_state_that_nothing_reads_belongs_to_it():
    original, variable = program(), Variable(np.zeros(2), "more")
    other = dataclasses.replace(
        original, state={**original.state, variable: placeholder((2,), "float32", "more", variable)}
    )
    assert structure_of(original).key != structure_of(other).key


def test_messages_belong_to_it():
    keys = {structure_of(place(program(), bucket_bytes=most)).key for most in (None, None, 16)}
    assert len(keys | {structure_of(program()).key}) == 3


def test_what_cannot_be_compared_has_none():
    array = np.zeros(3)
    traced = program()
    tensor = next(tensor for tensor in traced.tensors if tensor.attributes)
    tensor.attributes = {**tensor.attributes, "array": array}
    assert structure_of(traced) is None


@pytest.mark.parametrize(("excess", "has_structure"), [(0, True), (4, False)])
def test_constants_of_many_bytes_have_none(excess, has_structure):
    constant = np.zeros((CONSTANTS + excess) // 4, np.float32)
    traced = trace(lambda x: {"y": x + constant}, {"x": ((), "float32")})
    assert (structure_of(traced) is not None) == has_structure


def test_a_whole_model_has_one_however_often_it_is_made():
    def step(rate, seed):
        w = Variable(np.random.default_rng(seed).normal(size=(4, 3)), "w")
        optimizer = optimizers.Adam(rate)
        optimizer.build([w])

        def train(x):
            loss = ops.mean(ops.square(x @ w))
            loss.backward()
            optimizer.apply([w.value.grad], [w])
            return {"loss": loss}

        return structure_of(trace(train, {"x": ((Dim.rows(5), 4), "float32")})).key

    assert step(0.1, 1) == step(0.2, 2)


# What is kept of them


@needs_compiler
@pytest.mark.parametrize("part", sample(range(PARTS), PARTS))
def test_other_runs_of_random_programs_compute_what_they_should(part):
    """Their values, variables and seeds differ; kernels and code are those of the first run."""
    compiles = by_compiled()
    for seed in range(part * PROGRAMS // PARTS, (part + 1) * PROGRAMS // PARTS):
        case = drawn(seed)
        for run in range(2):
            outputs = not_optimized(lambda case=case, run=run: run_alone(case, compiles, run))
            assert not (fault := expected(case, run).wrong(outputs)), f"{fault} of run {run}\n{case}"
        first, second = (case.trace(run) for run in (0, 2))
        assert lowered(first)[0].views is lowered(second)[0].views, case


@pytest.mark.parametrize("count", sample([20, 80], 2))
def test_equal_structures_have_equal_code(count):
    """Of programs that were drawn and of those in which a bug was found: whatever has one key has one text."""
    texts = {}
    cases = [*(drawn(seed) for seed in range(count)), *(case for case in CORPUS.values() if not case.mesh)]
    for case, run in itertools.product(cases, range(2)):
        traced = without_ranks(case.trace(run))
        structure = structure_of(traced)
        if structure is None:
            continue
        code = generate(fuse(traced))
        text = code.source, [root.shape for root in code.roots], [structure.seeds.index(seed) for seed in code.seeds]
        assert texts.setdefault(structure.key, text) == text, case
    assert len(texts) > 10


@needs_compiler
@pytest.mark.parametrize("name", OTHERS)
def test_what_was_kept_changes_no_number(name):
    rng = np.random.default_rng(0)
    for options in ({}, OTHERS[name], {}, OTHERS[name]):
        traced = program(**options, variables=None)
        x = rng.normal(size=(6, *next(iter(traced.inputs.values())).shape[1:]))
        values = {"x": x.astype(traced.inputs["x"].dtype)}
        outputs, updates = evaluate(traced, values)
        executable = CompiledExecutable(traced, HostMemory(), values)
        executable.run()
        for key, value in outputs.items():
            np.testing.assert_allclose(executable.outputs[key], value, rtol=1e-5)
        for variable, value in updates.items():
            np.testing.assert_array_equal(variable.numpy(), value)


@needs_compiler
def test_an_array_that_its_owner_changes_is_no_constant_of_another_program():
    array, x = np.zeros(3, np.float32), np.ones(3, np.float32)
    for value in (array, np.zeros(3, np.float32)):
        traced = trace(lambda x, value=value: {"y": x + value}, {"x": ((3,), "float32")})
        executable = CompiledExecutable(traced, HostMemory(), {"x": x})
        executable.run()
        np.testing.assert_array_equal(executable.outputs["y"], x)
        array[:] = 5


def test_numbers_of_rows_are_no_constants():
    def counting(rows):
        return trace(lambda x: {"y": ops.sum(x) / x.shape[0]}, {"x": ((Dim.rows(rows), 2), "float32")})

    assert structure_of(counting(5)).key == structure_of(counting(6)).key


@needs_compiler
def test_seeds_of_numbers_that_numpy_draws():
    """The count of draws is an element of an array, which C++ does not take."""
    for seed in (3, 4):
        counts = Variable(np.arange(3), "counts", dtype="uint64")

        def step(x, seed=seed, counts=counts):
            bits = random_bits(counts.value[1], shape=(5, 2), seed=seed, purpose=Purpose.DROPOUT, number=0)
            return {"bits": x + ops.cast(bits, "float64")}

        traced, values = trace(step, {"x": ((), "float64")}), {"x": np.zeros(())}
        executable = CompiledExecutable(traced, HostMemory(), values)
        assert any(isinstance(part, Call) for part in executable.code.parts)
        executable.run()
        np.testing.assert_array_equal(executable.outputs["bits"], evaluate(traced, values)[0]["bits"])


def test_what_a_rank_does_alone_is_another():
    def messages(alone):
        placed = place(trace(lambda x: {"y": ops.sum(x)}, {"x": ((Dim.rows(6), 4), "float32")}))
        return [stage.messages for stage in lowered(placed, alone=alone)[0].stages if stage.messages]

    assert not messages(True)
    assert messages(False)


def test_loops_that_are_not_joined_are_others():
    assert len(lowered(program())[0].kernels) < len(lowered(program(), join=False)[0].kernels)


@needs_compiler
def test_nothing_keeps_the_variables_of_an_ended_run():
    variables = {letter: Variable(np.full((4,), 2.0), letter) for letter in "wv"}

    def step(x):
        loss = ops.sum(x * variables["w"])
        loss.backward()
        variables["w"].assign(variables["w"] - variables["w"].value.grad)
        return {"loss": loss, "total": ops.sum(variables["w"]) + ops.sum(variables["v"])}

    placed = place(trace(step, {"x": ((Dim.rows(6), 4), "float32")}), [variables["v"]])
    assert placed.derived.outputs
    assert placed.weight_gradients
    CompiledExecutable(placed, HostMemory(), {"x": np.zeros((6, 4), np.float32)}).run()
    references = [weakref.ref(variable) for variable in variables.values()]
    del placed
    variables.clear()
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert compiled._LOWERED


@pytest.mark.parametrize(("others", "is_kept"), [(compiled.KEPT - 1, True), (compiled.KEPT, False)])
def test_what_was_used_last_is_kept(others, is_kept):
    first = lowered(program())[0].views
    for number in range(others):
        lowered(program(slope=1.0 + number))
        assert len(compiled._LOWERED) <= compiled.KEPT
    assert (lowered(program())[0].views is first) == is_kept


def test_what_is_used_stays():
    first = lowered(program())[0].views
    for number in range(2 * compiled.KEPT):
        lowered(program(slope=1.0 + number))
        assert lowered(program())[0].views is first


def test_loops_have_the_structure_of_their_bodies():
    """Programs that differ in what a step computes differ, also where one value of a loop is read."""

    def key_of(make):
        u, b = (Variable(np.ones(shape), name) for name, shape in (("u", (3, 3)), ("b", 3)))
        program = trace(lambda x: {"loss": make(x, u.value, b.value)}, {"x": ((4, Dim.rows(5), 3), "float64")})
        return structure_of(program).key

    def steps(function):
        return lambda x, u, b: ops.sum(ops.scan(lambda c, part: (function(c, part), None), x[0] * b, x @ u)[0])

    functions = [ops.add, ops.subtract, lambda c, part: ops.tanh(c) + part, lambda c, part: ops.sin(c) + part]
    losses = [loss for name, loss in LOOPS.items() if name != "of_no_steps"] + list(map(steps, functions))
    keys = [key_of(loss) for loss in losses]
    assert keys == [key_of(loss) for loss in losses]
    assert len(set(keys)) == len(losses)
