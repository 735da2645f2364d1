"""Functions of ops take Keras' arguments: names, order and defaults."""

import inspect

import numpy as np
import pytest

import dptrain
from dptrain import ops
from dptrain.program.op import Op

# `stop_gradient`'s, `relu`'s and others' functions are NumPy's, with an `out` besides.
OWN = {"out", "first_row"}


def arguments(function):
    of = function.compute if isinstance(function, Op) else function
    parameters = inspect.signature(of).parameters.values()
    kinds = (inspect.Parameter.VAR_KEYWORD,)
    return [
        (parameter.name, None if parameter.default is parameter.empty else parameter.default)
        for parameter in parameters
        if parameter.name not in OWN and parameter.kind not in kinds
    ]


def test_arguments_are_those_of_keras(keras):
    shared_names = [name for name in ops.__all__ if inspect.isfunction(getattr(keras.ops, name, None))]
    assert len(shared_names) > 250
    theirs = {name: arguments(getattr(keras.ops, name)) for name in shared_names}
    assert {name: arguments(getattr(ops, name)) for name in shared_names} == theirs


def test_rooms_are_those_of_keras(keras):
    for ours, theirs in ((ops.nn, keras.ops.nn), (ops.numpy, keras.ops.numpy)):
        assert {name for name in dir(theirs) if not name.startswith("_")} & set(ops.__all__) == set(ours.__all__)
    assert float(np.asarray(ops.numpy.sum([1.0]))) == 1


@pytest.mark.parametrize("room", ["losses", "metrics", "optimizers", "constraints", "regularizers"])
def test_arguments_of_constructors_are_attributes(keras, room):
    """What Keras keeps of a constructor's arguments, the object has under the same name."""
    required = {"learning_rate": 0.1, "num_classes": 2, "target_class_ids": [0], "name": "x"}
    required |= dict.fromkeys(("specificity", "sensitivity", "precision", "recall"), 0.5)
    compared = 0
    for name, theirs in vars(getattr(keras, room)).items():
        ours = getattr(getattr(dptrain, room), name, None)
        if not isinstance(theirs, type) or not isinstance(ours, type) or inspect.isabstract(ours):
            continue
        parameters = inspect.signature(theirs).parameters.values()
        needed = [parameter.name for parameter in parameters if parameter.default is parameter.empty]
        if not set(needed) <= set(required) | {"args", "kwargs"}:
            continue
        values = {key: required[key] for key in needed if key in required}
        expected, actual = theirs(**values), ours(**values)
        kept = [parameter.name for parameter in parameters if hasattr(expected, parameter.name)]
        assert [key for key in kept if not hasattr(actual, key)] == [], name
        compared += len(kept)
    assert compared >= 2
