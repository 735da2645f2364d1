"""Meshes and layouts have Keras' arguments, attributes and messages, and give variables Keras' layouts."""

import inspect
from types import ModuleType

import numpy as np
import pytest

import dptrain as dp
from dptrain import comm
from dptrain.comm import SoloCommunicator
from dptrain.registry.names import keras_names

DEVICES = [f"cpu:{rank}" for rank in range(8)]


@pytest.fixture(autouse=True)
def eight_ranks(monkeypatch):
    ranks = SoloCommunicator()
    ranks.size = 8
    monkeypatch.setattr(comm, "_current", ranks)


def arguments(called) -> list[tuple]:
    parameters = inspect.signature(called).parameters.values()
    return [
        (parameter.name, parameter.default, parameter.kind)
        for parameter in parameters
        if parameter.kind is not parameter.VAR_KEYWORD
    ]


@pytest.mark.parametrize("name", sorted(keras_names()["distribution"]))
def test_names_and_arguments(keras, name):
    ours, theirs = getattr(dp.distribution, name), getattr(keras.distribution, name)
    assert arguments(ours) == arguments(theirs)
    if inspect.isclass(theirs):
        methods = {name: method for name, method in inspect.getmembers(theirs, inspect.isfunction) if name[0] != "_"}
        for method, method_of_keras in methods.items():
            if method != "distribute_tf_dataset":  # dptrain has no data sets of TensorFlow's
                assert arguments(getattr(ours, method)) == arguments(method_of_keras), method


def examples(room: ModuleType) -> list:
    """Return one of each class."""
    mesh = room.DeviceMesh((2, 4), ["batch", "model"], DEVICES)
    layouts = room.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    layouts["hidden/bias"] = room.TensorLayout(["model"])
    rows = room.DataParallel(room.DeviceMesh((8,), ["rows"], DEVICES))
    return [mesh, layouts["hidden/bias"], layouts, rows, room.ModelParallel(layout_map=layouts)]


def test_attributes(keras):
    for ours, theirs in zip(examples(dp.distribution), examples(keras.distribution), strict=True):
        lacking = {name for name in dir(theirs) if name[0] != "_"} - set(dir(ours))
        assert lacking <= {"distribute_tf_dataset"}, type(ours)
        if "Map" not in type(ours).__name__:  # which shows its address
            assert repr(ours) == repr(theirs)


def test_layouts(keras):
    ours, theirs = examples(dp.distribution)[3:], examples(keras.distribution)[3:]
    for mine, expected in zip(ours, theirs, strict=True):
        assert mine.batch_dim_name == expected.batch_dim_name
        assert mine.num_model_replicas == expected.num_model_replicas
        assert mine.get_data_layout((5, 6, 7)).axes == expected.get_data_layout((5, 6, 7)).axes
        for path, shape in (("a/dense_1/kernel", (2, 3)), ("hidden/bias", (3,)), ("dense/bias", (3,))):
            variable = dp.Variable(np.ones(shape), name=path)
            assert mine.get_variable_layout(variable).axes == expected.get_variable_layout(variable).axes
            layouts = [distribution.get_tensor_layout(path) for distribution in (mine, expected)]
            assert len({None if layout is None else layout.axes for layout in layouts}) == 1


def refusals(room: ModuleType) -> dict[str, str]:
    """Return what is said of what is wrong."""
    mesh, layout, layouts, *_ = examples(room)
    wrong = {
        "no mesh": lambda: room.DeviceMesh((), []),
        "no names": lambda: room.DeviceMesh((8,), None),
        "sizes": lambda: room.DeviceMesh((4, 2), ["a"], DEVICES),
        "devices": lambda: room.DeviceMesh((4, 2), ["a", "b"], DEVICES[:4]),
        "mesh set twice": lambda: setattr(layout, "device_mesh", mesh),
        "key set twice": lambda: layouts.update({"hidden/bias": layout}),
        "text": lambda: layouts.update({"x": "model"}),
        "not a mesh": lambda: room.DataParallel("cpu:0"),
        "no map": lambda: room.ModelParallel(),
        "not a map": lambda: room.ModelParallel(layout_map={"x": ("model",)}),
    }
    messages = {}
    for name, action in wrong.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            action()
        messages[name] = str(caught.value)
    return messages


def test_messages(keras):
    assert refusals(dp.distribution) == refusals(keras.distribution)
