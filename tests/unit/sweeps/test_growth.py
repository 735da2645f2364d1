"""Which differences of two plans only let a sweep grow: more of what it has, and nothing less or other."""

import copy
import json

import pytest

from dptrain.sweeps.growth import added_epochs, differences

PLAN = {
    "seeds": [0, 1, 2],
    "space": {"grid": {"rate": [0.1, 0.2], "layers": [[8], [8, 4]]}, "samples": 4, "fields": {"x": {"low": 0}}},
    "adaptive": 10,
    "epochs": 5,
    "config": {"batch_size": 32, "name": "a", "shards": [1, 2]},
}
LISTS = [("seeds",), ("space", "grid", "rate"), ("space", "grid", "layers")]
NUMBERS = [("space", "samples"), ("adaptive",), ("epochs",)]
FIXED = [("config", "batch_size"), ("config", "name"), ("config", "shards"), ("space", "fields", "x", "low")]


def changed(path, change):
    """Return another plan, and its value there as it was."""
    plan = copy.deepcopy(PLAN)
    inner = plan
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = change(inner[path[-1]])
    return plan


def found(there, here):
    return differences(json.loads(json.dumps(there)), json.loads(json.dumps(here)))


@pytest.mark.parametrize("path", LISTS, ids=".".join)
def test_a_list_may_gain_values_in_any_order_and_lose_none(path):
    for grow in (lambda old: [*old, "new"], lambda old: ["new", *old], lambda old: [*old[::-1], "new"], list):
        assert found(PLAN, changed(path, grow)) == []
    for shrink in (lambda old: old[1:], lambda old: [*old[1:], "new"], lambda old: [*old[:-1], "new", "newer"]):
        assert found(PLAN, changed(path, shrink))


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
def test_a_number_may_grow(path):
    assert found(PLAN, changed(path, lambda old: old + 3)) == []
    (text,) = found(PLAN, changed(path, lambda old: old - 1))
    old = changed(path, lambda old: old)
    for key in path:
        old = old[key]
    assert text == f"{'.'.join(path)}: {old} there, {old - 1} here"


@pytest.mark.parametrize("path", FIXED, ids=".".join)
def test_what_else_differs_is_named(path):
    for change in (lambda old: [old, 1], lambda _: None):
        texts = found(PLAN, changed(path, change))
        assert texts
        assert all(text.startswith(".".join(path)) for text in texts)


def test_what_one_plan_lacks_is_named():
    (text,) = found(PLAN, {name: value for name, value in PLAN.items() if name != "config"})
    assert text.startswith("config: ")
    assert text.endswith(" there, nothing here")


def test_epochs_that_are_more_and_with_halving_may_not_be():
    more = PLAN | {"epochs": 8}
    assert added_epochs(PLAN, more) == 5
    assert added_epochs(PLAN, PLAN) is added_epochs(more, PLAN) is None
    halving = {"halving": {"eta": 3}}
    (text,) = found(PLAN | halving, more | halving)
    assert text == "epochs: 5 there, 8 here (with halving, the number of epochs cannot grow)"
