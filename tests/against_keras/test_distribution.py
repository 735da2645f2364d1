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
    found = inspect.signature(called).parameters.values()
    return [(one.name, one.default, one.kind) for one in found if one.kind is not one.VAR_KEYWORD]


@pytest.mark.parametrize("name", sorted(keras_names()["distribution"]))
def test_names_and_arguments(keras, name):
    ours, theirs = getattr(dp.distribution, name), getattr(keras.distribution, name)
    assert arguments(ours) == arguments(theirs)
    if inspect.isclass(theirs):
        methods = {one: found for one, found in inspect.getmembers(theirs, inspect.isfunction) if one[0] != "_"}
        for method, found in methods.items():
            if method != "distribute_tf_dataset":  # dptrain has no data sets of TensorFlow's
                assert arguments(getattr(ours, method)) == arguments(found), method


def made(room: ModuleType) -> list:
    """Return one of each class."""
    mesh = room.DeviceMesh((2, 4), ["batch", "model"], DEVICES)
    layouts = room.LayoutMap(mesh)
    layouts[".*dense.*kernel"] = (None, "model")
    layouts["hidden/bias"] = room.TensorLayout(["model"])
    rows = room.DataParallel(room.DeviceMesh((8,), ["rows"], DEVICES))
    return [mesh, layouts["hidden/bias"], layouts, rows, room.ModelParallel(layout_map=layouts)]


def test_attributes(keras):
    for ours, theirs in zip(made(dp.distribution), made(keras.distribution), strict=True):
        lacking = {name for name in dir(theirs) if name[0] != "_"} - set(dir(ours))
        assert lacking <= {"distribute_tf_dataset"}, type(ours)
        if "Map" not in type(ours).__name__:  # which shows its address
            assert repr(ours) == repr(theirs)


def test_layouts(keras):
    ours, theirs = made(dp.distribution)[3:], made(keras.distribution)[3:]
    for own, other in zip(ours, theirs, strict=True):
        assert own.batch_dim_name == other.batch_dim_name
        assert own.num_model_replicas == other.num_model_replicas
        assert own.get_data_layout((5, 6, 7)).axes == other.get_data_layout((5, 6, 7)).axes
        for path, shape in (("a/dense_1/kernel", (2, 3)), ("hidden/bias", (3,)), ("dense/bias", (3,))):
            variable = dp.Variable(np.ones(shape), name=path)
            assert own.get_variable_layout(variable).axes == other.get_variable_layout(variable).axes
            found = [one.get_tensor_layout(path) for one in (own, other)]
            assert len({None if one is None else one.axes for one in found}) == 1


def refusals(room: ModuleType) -> dict[str, str]:
    """Return what is said of what is wrong."""
    mesh, layout, layouts, *_ = made(room)
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
    found = {}
    for name, action in wrong.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            action()
        found[name] = str(caught.value)
    return found


def test_messages(keras):
    assert refusals(dp.distribution) == refusals(keras.distribution)
