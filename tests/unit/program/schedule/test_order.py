"""Which new values overwrite old ones, what waits for that, and when nests run that nobody waits for."""

import numpy as np

from dptrain import ops
from dptrain.backend.cuda.policy import POLICY
from dptrain.program.program import trace
from dptrain.program.schedule.fuse import fuse
from dptrain.program.tensor import Variable


def scheduled(step, **shapes):
    """Return a program's schedule, and its nest of each new value."""
    schedule = fuse(trace(step, {name: (shape, "float32") for name, shape in shapes.items()}), POLICY)
    new = {variable.path: tensor for variable, tensor in schedule.program.updates.items()}
    return schedule, {path: schedule.nest_of.get(tensor) for path, tensor in new.items()}


def variables(*shapes):
    return [Variable(np.ones(shape, np.float32), f"w{index}") for index, shape in enumerate(shapes)]


def test_a_new_value_waits_for_all_readers_of_the_old_one():
    (weight,) = variables((4, 3))

    def step(x):
        old = weight.value
        weight.assign(old - x)
        return {"columns": ops.sum(old, 0), "rows": ops.max(old, 1)}

    schedule, nests = scheduled(step, x=(4, 3))
    (new,) = schedule.program.updates.values()
    assert schedule.in_place == {new}
    assert not schedule.copies
    others = {nest for nest in schedule.nests if nest is not nests["w0"]}
    assert len(others) == 2
    assert nests["w0"].after == others
    assert nests["w0"].level == 1 + max(nest.level for nest in others)


def test_values_that_are_exchanged_element_by_element_overwrite_each_other():
    first, second = variables((3,), (3,))

    def step(x):
        old, other = first.value, second.value
        first.assign(other + x)
        second.assign(old * x)
        return {}

    schedule, nests = scheduled(step, x=(3,))
    assert len(schedule.in_place) == 2
    assert nests["w0"] is nests["w1"]


def test_values_that_are_made_of_other_elements_are_copied_after_these_have_been_read():
    first, second = variables((3,), (3,))

    def step(x):
        old, other = first.value, second.value
        first.assign(other[::-1] + x)
        second.assign(old[::-1] * x)
        return {}

    schedule, nests = scheduled(step, x=(3,))
    assert not schedule.in_place
    assert schedule.copies.keys() == set(schedule.program.updates.values())
    for new, copy in schedule.copies.items():
        (nest,) = [nest for nest in schedule.nests if copy in nest.members]
        assert schedule.written >= {new, copy}
        assert nest.after >= {schedule.nest_of[new]}
        assert nest.level > max(nest.level for nest in nests.values())
        assert list(nest.reads) == [new]


def test_a_copy_waits_for_all_readers_of_the_old_value():
    (weight,) = variables((4, 3))

    def step(x):
        old = weight.value
        weight.assign(ops.transpose(ops.reshape(old, (3, 4))) * 2)
        return {"later": old - ops.max(ops.max(x, 1, keepdims=True) * x, 0)}

    schedule, nests = scheduled(step, x=(4, 3))
    (copy,) = schedule.copies.values()
    later = schedule.nest_of[schedule.program.outputs["later"]]
    assert later is not nests["w0"]
    assert schedule.nest_of[copy].after == {nests["w0"], later}


def test_what_nobody_waits_for_does_not_run_beside_a_product_where_another_level_comes():
    (bias,) = variables((8,))

    def step(x, w, v):
        y = ops.exp(x @ w)
        bias.assign(bias * 0.5 + v)
        return {"y": ops.max(y @ w, 1)}

    schedule, nests = scheduled(step, x=(4, 8), w=(8, 8), v=(8,))
    levels = {nest.level: nest.frame for nest in schedule.nests if nest is not nests["w0"]}
    assert levels == {1: "product", 2: "product", 3: "rows"}
    assert nests["w0"].level == 3
