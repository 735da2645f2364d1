"""Public names of our classes that Keras' do not have: scripts' subclasses may use them for attributes of their own."""

import inspect

import pytest

import dptrain as dp

# What Keras has on instances, or on other classes of the kind, and what scripts may ask for (docs/keras.md).
KNOWN = {
    "callbacks": {"copies_of_weights", "load_state_dict", "state_dict"},
    "constraints": set(),
    "distribution": set(),
    "dtype_policies": set(),
    "initializers": set(),
    "layers": {
        "activation",
        "idf_weights",
        "mean",
        "name",
        "rank",
        "recurrent_activation",
        "states",
        "variance",
        "vocabulary",
    },
    "losses": set(),
    "metrics": {"accumulator", "false_negatives", "false_positives", "true_negatives", "true_positives"},
    "optimizers": {"slots_of"},
    "optimizers.schedules": {
        "alpha",
        "cycle",
        "end_learning_rate",
        "m_mul",
        "name",
        "power",
        "staircase",
        "t_mul",
        "warmup_steps",
        "warmup_target",
    },
    "regularizers": set(),
}


def _public(cls):
    return {name for name in dir(cls) if not name.startswith("_")}


def _room(module, path):
    for name in path.split("."):
        module = getattr(module, name)
    return module


@pytest.mark.parametrize("room", KNOWN)
def test_classes_have_no_public_names_of_their_own(keras, room):
    ours, theirs, extra = _room(dp, room), _room(keras, room), {}
    for name in filter(theirs.__dict__.__contains__, ours.__all__):
        pair = getattr(ours, name), getattr(theirs, name)
        if all(map(inspect.isclass, pair)) and (names := _public(pair[0]) - _public(pair[1]) - KNOWN[room]):
            extra[name] = sorted(names)
    assert extra == {}


def test_variables_have_no_public_names_of_their_own(keras):
    assert _public(dp.Variable) - _public(keras.Variable) == {"T"}  # as tensors have
