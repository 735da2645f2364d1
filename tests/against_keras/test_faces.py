"""Classes and functions of pictures, and what trains on them, take Keras' arguments: names, order and defaults.

By their signatures alone, which costs next to nothing; what Keras has and dptrain refuses stands in
docs/not-supported.md.
"""

import inspect
from collections import Counter

import pytest

import dptrain as dp
from dptrain.registry.names import keras_names

ROOMS = (
    *("layers", "losses", "metrics", "optimizers", "optimizers.schedules", "ops.image", "ops.nn", "initializers"),
    *("regularizers", "constraints", "callbacks", "applications", "applications.imagenet_utils"),
    *(f"applications.{one}" for one in ("resnet", "resnet_v2", "vgg16", "vgg19", "mobilenet", "mobilenet_v2")),
    "applications.efficientnet",
)
# What Keras has otherwise, and why ours differs.
OTHERWISE = {
    "layers.Input": "no ragged tensors",
    "metrics.sparse_top_k_categorical_accuracy": "from_sorted_ids is an argument of Keras' own metric",
    "callbacks.CallbackList": "made by the trainer",
    "losses.deserialize": "Keras calls the configuration `name`",
    **{
        f"{room}.serialize": "the first argument has one name in all rooms"
        for room in ("layers", "losses", "metrics", "optimizers", "optimizers.schedules", "initializers")
    },
}


def parameters(found):
    """Return name and default of each argument, and which are positional; options of all layers are left out."""
    function = found.__init__ if inspect.isclass(found) else getattr(found, "compute", found)
    wanted = {}
    for one in inspect.signature(function).parameters.values():
        if one.kind not in (one.VAR_KEYWORD, one.VAR_POSITIONAL) and one.name not in ("self", "out", "first_row"):
            wanted[one.name] = one.default
    return wanted


def same(own, other, name):
    """Whether a default stands for what Keras' does."""
    if own is other or own == other:
        return True
    if other is inspect.Parameter.empty:  # Keras asks for it
        return True
    if isinstance(other, tuple) and len(set(other)) == 1:  # one number for all axes
        return own == other[0]
    return name == "name" and own is None  # which then is Keras'


def compared(room):
    names = sorted(keras_names().get(room, ()))
    ours = dp
    for part in room.split("."):
        ours = getattr(ours, part)
    for name in names:
        if name not in getattr(ours, "__all__", dir(ours)):
            continue
        found = getattr(ours, name)
        if callable(found):
            yield name, found


@pytest.mark.parametrize("room", ROOMS)
def test_arguments_have_keras_names_order_and_defaults(keras, room):
    theirs = keras
    for part in room.split("."):
        theirs = getattr(theirs, part)
    seen, wrong = Counter(), {}
    for name, found in compared(room):
        try:
            own, other = parameters(found), parameters(getattr(theirs, name))
        except ValueError:  # one of them is not written in Python
            continue
        seen[room] += 1
        common = [one for one in own if one in other]
        missing = [one for one in other if one not in own and not takes_options(found)]
        differing = [one for one in common if not same(own[one], other[one], one)]
        if common != [one for one in other if one in own] or missing or differing:
            wrong[name] = {"order": common, "missing": missing, "differing": differing}
    meant = {one.rpartition(".")[2] for one in OTHERWISE if one.rpartition(".")[0] == room}
    assert {name: what for name, what in wrong.items() if name not in meant} == {}
    assert set(wrong) >= meant, "not otherwise any more"
    assert seen[room] >= 2


def takes_options(found):
    """Whether it takes further arguments by keyword, which its base class checks."""
    function = found.__init__ if inspect.isclass(found) else found
    kinds = {one.kind for one in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds
