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
    *(f"applications.{module}" for module in ("resnet", "resnet_v2", "vgg16", "vgg19", "mobilenet", "mobilenet_v2")),
    "applications.efficientnet",
)
# What Keras has otherwise, and why ours differs.
OTHERWISE = {
    "layers.Input": "no ragged tensors",
    "callbacks.CallbackList": "made by the trainer",
    "losses.deserialize": "Keras calls the configuration `name`",
    **{
        f"{room}.serialize": "the first argument has one name in all rooms"
        for room in ("losses", "metrics", "optimizers", "optimizers.schedules", "initializers")
    },
}


def parameters(symbol):
    """Return name and default of each argument, and which are positional; options of all layers are left out."""
    function = symbol.__init__ if inspect.isclass(symbol) else getattr(symbol, "compute", symbol)
    defaults = {}
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and parameter.name not in (
            "self",
            "out",
            "first_row",
        ):
            defaults[parameter.name] = parameter.default
    return defaults


def same(parameter, their_parameter, name):
    """Whether a default stands for what Keras' does."""
    if parameter is their_parameter or parameter == their_parameter:
        return True
    if their_parameter is inspect.Parameter.empty:  # Keras asks for it
        return True
    if isinstance(their_parameter, tuple) and len(set(their_parameter)) == 1:  # one number for all axes
        return parameter == their_parameter[0]
    return name == "name" and parameter is None  # which then is Keras'


def compared(room):
    names = sorted(keras_names().get(room, ()))
    ours = dp
    for part in room.split("."):
        ours = getattr(ours, part)
    for name in names:
        if name not in getattr(ours, "__all__", dir(ours)):
            continue
        member = getattr(ours, name)
        if callable(member):
            yield name, member


@pytest.mark.parametrize("room", ROOMS)
def test_arguments_have_keras_names_order_and_defaults(keras, room):
    theirs = keras
    for part in room.split("."):
        theirs = getattr(theirs, part)
    counts, wrong = Counter(), {}
    for name, symbol in compared(room):
        try:
            mine, their = parameters(symbol), parameters(getattr(theirs, name))
        except ValueError:  # one of them is not written in Python
            continue
        counts[room] += 1
        common = [name for name in mine if name in their]
        missing = [name for name in their if name not in mine and not takes_options(symbol)]
        differing = [name for name in common if not same(mine[name], their[name], name)]
        if common != [name for name in their if name in mine] or missing or differing:
            wrong[name] = {"order": common, "missing": missing, "differing": differing}
    allowed_names = {
        symbol_path.rpartition(".")[2] for symbol_path in OTHERWISE if symbol_path.rpartition(".")[0] == room
    }
    assert {name: difference for name, difference in wrong.items() if name not in allowed_names} == {}
    assert set(wrong) >= allowed_names, "not otherwise any more"
    assert counts[room] >= 2


def takes_options(symbol):
    """Whether it takes further arguments by keyword, which its base class checks."""
    function = symbol.__init__ if inspect.isclass(symbol) else symbol
    kinds = {parameter.kind for parameter in inspect.signature(function).parameters.values()}
    return inspect.Parameter.VAR_KEYWORD in kinds
