"""Which variables are sharded over a mesh of ranks."""

from types import SimpleNamespace

import numpy as np
import pytest

from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable
from dptrain.train import sharding
from dptrain.train.sharding import Sharding
from tests.thread_ranks import on_mesh


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            ("model", None),
            r"layout \('model', None\) of 'w', of shape \(2, 3\): axis 0 of length 2 cannot be sharded over",
        ),
        (
            (None, "model", "batch"),
            "layout .* of 'w', of shape .*: expected an axis of the mesh or None for each of its",
        ),
    ],
)
def test_a_layout_that_does_not_fit_its_variable_is_refused(monkeypatch, axes, said):
    weight = Variable(np.ones((2, 3)), "w")
    owner = SimpleNamespace(weights=[weight], _all_optimizers=[])
    chosen = [(None, "model"), axes]
    monkeypatch.setattr(sharding, "layout_of", lambda *arguments: chosen[0])

    def layouts(comm):
        return Sharding(comm, owner, None).layouts([weight])

    assert on_mesh(layouts, batch=1, model=3) == [{weight: (None, "model")}] * 3
    chosen.pop(0)
    with pytest.raises(ConfigError, match=said):
        on_mesh(layouts, batch=1, model=3)


def test_the_axis_that_the_batch_shards(monkeypatch):
    """The first if it is long beside the ranks, else the longest; none that is taken, or shorter than the ranks."""
    expected = {
        (16, 50): ("batch", None),
        (15, 50): (None, "batch"),
        (4, 4): ("batch", None),
        (3, 1, 2): ("batch", None, None),
        (2, 9): (None, "batch"),
        (2,): ("batch",),
        (1, 1): (None, None),
        (50, 3): (None, "batch"),
        (50, 1): ("model", None),
    }
    slots = {Variable(np.ones(shape), "s"): Variable(np.ones(shape), "w") for shape in expected}
    owner = SimpleNamespace(weights=list(slots.values()), _all_optimizers=[SimpleNamespace(_all_slots=slots)])
    variables, stranger = [*slots.values(), *slots], Variable(np.ones(9), "x")
    axes_by_variable = {variable: ("model", None) for variable in variables if variable.shape[0] == 50}
    monkeypatch.setattr(sharding, "layout_of", lambda variable, slot_of: axes_by_variable.get(variable))

    def layouts(comm):
        return [Sharding(comm, owner, kind).layouts([*variables, stranger]) for kind in (None, "optimizer", "weights")]

    for none, of_slots, of_weights in on_mesh(layouts, batch=2, model=2):
        assert none == axes_by_variable
        expected_slots = {slot: axes for slot, axes in zip(slots, expected.values(), strict=True) if any(axes)}
        expected_slots = {
            slot: axes if slot not in axes_by_variable else ("model", axes[1]) for slot, axes in expected_slots.items()
        }
        assert (
            of_slots
            == {variable: axes for variable, axes in axes_by_variable.items() if variable not in slots} | expected_slots
        )
        assert of_weights == expected_slots | {slots[slot]: axes for slot, axes in expected_slots.items()}
    for actual in on_mesh(layouts, batch=1, model=4):
        assert actual == [axes_by_variable] * 3, "one rank has no parts"


def test_parts_are_those_of_the_whole_value(monkeypatch):
    """Taken from rank 0, read by all ranks or fetched for one, written by all."""
    chosen = {"a": ("batch", "model"), "b": (None, "model"), "c": (None,)}
    monkeypatch.setattr(sharding, "layout_of", lambda variable, slot_of: chosen[variable.name])
    shapes = {"a": (5, 7), "b": (2, 3), "c": (4,)}
    full = {name: np.random.default_rng(1).normal(size=shape) for name, shape in shapes.items()}

    def work(comm):
        variables = [Variable(full[name] + comm.rank, name) for name in shapes]
        sharding = Sharding(comm, SimpleNamespace(weights=variables, _all_optimizers=[]), None)
        sharding.take(variables)
        parts = sharding.local(variables)
        taken = [part.numpy() for part in parts]
        for variable, part in zip(variables, taken, strict=True):
            of = sharding.part(variable).of
            np.testing.assert_array_equal(of(full[variable.name] + comm.rank * (variable.name == "c")), part)
            assert of(part) is part
        read = [variable.numpy() for variable in variables[:2]]
        for variable in variables[:2]:
            variable.assign(2 * variable.numpy())
        with sharding.fetched(lambda: variables, rank=1):
            fetched = [variable.numpy() for variable in variables[:2]] if comm.rank == 1 else []
        groups = [
            (group.size, [variable.name for variable in members])
            for group, members in sharding.by_group(variables).items()
        ]
        return (
            comm.coordinates,
            taken,
            read,
            fetched,
            groups,
            [sharding.name(part) for part in parts],
            sharding.groups(parts),
        )

    results = on_mesh(work, batch=2, model=3)
    for rank, (at, values_taken, read, fetched, groups, names, numbers) in enumerate(results):
        rows = slice(*((0, 2), (2, 5))[at["batch"]])
        columns = slice(*((0, 2), (2, 4), (4, 7))[at["model"]])
        for array, wanted in zip(values_taken, (full["a"][rows, columns], full["b"][:, [at["model"]]]), strict=False):
            np.testing.assert_array_equal(array, wanted)
        np.testing.assert_array_equal(values_taken[2], full["c"] + rank)
        for array, other in zip([*read, *fetched], [full["a"], full["b"], 2 * full["a"], 2 * full["b"]], strict=False):
            np.testing.assert_array_equal(array, other)
        assert len(fetched) == 2 * (rank == 1)
        assert groups == [(1, ["a"]), (2, ["b"]), (6, ["c"])]
        assert names == [f"a of batch {at['batch']}, model {at['model']}", f"b of model {at['model']}", "c"]
        assert numbers == [
            ([[0, 1, 2, 3, 4, 5]], [2]),
            ([[0], [1], [2], [3], [4], [5]], [0]),
            ([[0, 3], [1, 4], [2, 5]], [1]),
        ]
