"""Meshes, layouts, and layouts by the paths of variables."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import dptrain as dp
from dptrain.distribution import DeviceMesh, LayoutMap, TensorLayout, distribute_tensor, list_devices
from dptrain.errors import ConfigError

NAMES = ["data", "model"]


@pytest.fixture
def mesh(eight) -> DeviceMesh:
    return DeviceMesh((4, 2), NAMES)


def test_a_mesh_is_a_grid_of_all_ranks(mesh):
    assert (mesh.shape, mesh.axis_names, mesh._lengths) == ((4, 2), NAMES, {"data": 4, "model": 2})
    assert mesh.devices.tolist() == [["cpu:0", "cpu:1"], ["cpu:2", "cpu:3"], ["cpu:4", "cpu:5"], ["cpu:6", "cpu:7"]]
    assert str(mesh) == repr(mesh) == "<DeviceMesh shape=(4, 2), axis_names=['data', 'model']>"
    mesh_of_array = DeviceMesh([2, 4], NAMES, np.reshape(list_devices(), (4, 2)))
    assert mesh_of_array.devices.tolist() == [[f"cpu:{rank}" for rank in row] for row in ((0, 1, 2, 3), (4, 5, 6, 7))]
    with pytest.raises(AttributeError, match="not supported: backend_mesh of DeviceMesh"):
        _ = mesh.backend_mesh


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), []), "Shape and axis_names cannot be empty. Received: shape=(), axis_names=[]"),
        (((8,), NAMES), "Shape and axis_names should have same size. Received: shape=(8,), axis_names="),
        (((4, 2), ["a", "a"]), "axis_names should be different from each other. Received: "),
        (((-4, -2), NAMES), "shape should be of integers >= 1. Received: "),
        (
            ((2, 2), NAMES),
            "Shape does not match the number of devices. Received: shape=(2, 2); devices.shape=(8,); each rank is a "
            "device: use mpirun -n 4",
        ),
        (
            ((8,), ["a"], ["cpu:0"]),
            "Shape does not match the number of devices. Received: shape=(8,); devices.shape=(1",
        ),
    ],
)
def test_meshes_that_are_none(eight, arguments, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        DeviceMesh(*arguments)


@pytest.mark.parametrize("ranks", [[1, 0], [0, 0], [0], [0, 1, 1], [1, 2]])
def test_a_mesh_has_the_device_of_each_rank_once_and_in_order(be, ranks):
    be(0, 2)
    devices = [f"cpu:{rank}" for rank in ranks]
    with pytest.raises(ConfigError) as caught:
        DeviceMesh((len(ranks),), ["batch"], devices)
    assert str(caught.value) == (
        f"not supported: a mesh of devices={devices}; expected ['cpu:0', 'cpu:1']: a mesh has the device of each rank "
        "once, in rank order"
    )


def test_a_layout_names_axes_of_its_mesh(mesh):
    layout = TensorLayout([None, "model"])
    assert (layout.axes, layout.device_mesh) == ((None, "model"), None)
    layout.device_mesh = mesh
    assert repr(layout) == f"<TensorLayout axes=(None, 'model'), device_mesh={mesh}>"
    with pytest.raises(ConfigError, match=r"^Cannot override device mesh value. Existing value is <DeviceMesh shape="):
        layout.device_mesh = mesh
    message = r"^Invalid axis names for Layout. Valid axis names: \['data', 'model'\], Got \['rows'\]$"
    with pytest.raises(ConfigError, match=message):
        TensorLayout(["rows", None], mesh)
    late = TensorLayout(("rows",))
    with pytest.raises(ConfigError, match=message):
        late.device_mesh = mesh
    assert late.device_mesh is None
    with pytest.raises(AttributeError, match="not supported: backend_layout of TensorLayout"):
        _ = layout.backend_layout


def test_a_map_takes_layouts_and_axes(mesh):
    layouts = LayoutMap(mesh)
    layouts["kernel"] = layout = TensorLayout((None, "model"))
    layouts["bias"] = ("model",)
    layouts["gamma"] = ["model"]
    layouts["beta"] = TensorLayout((None,), DeviceMesh([4, 2], tuple(NAMES)))
    assert layouts["kernel"] is layout
    assert layout.device_mesh is layouts["bias"].device_mesh is layouts.device_mesh is mesh
    assert layouts["bias"].axes == layouts["gamma"].axes == ("model",)
    assert list(layouts) == ["kernel", "bias", "gamma", "beta"]
    assert len(layouts) == 4
    assert "kernel" in layouts
    assert "dense/kernel" not in layouts
    assert "dense/alpha" not in layouts
    assert layouts.pop("kernel") is layout
    with pytest.raises(KeyError):
        del layouts["b.as"]
    assert layouts.get("dense/kernel") is None


@pytest.mark.parametrize(
    ("key", "layout", "message"),
    [
        ("kernel", ("model",), "kernel already exist in the LayoutMap with value <TensorLayout axes=('model',), dev"),
        ("bias", "model", "model should be a TensorLayout type, got <class 'str'>"),
        ("bias", ("rows",), "Invalid axis names for Layout. Valid axis names: ['data', 'model'], Got ['rows']"),
        (
            "*bias",
            ("model",),
            "LayoutMap: the key '*bias' is not a regular expression: nothing to repeat at position 0",
        ),
        (3, ("model",), "LayoutMap: the key 3 is not a regular expression: first argument must be string"),
    ],
)
def test_what_a_map_refuses(mesh, key, layout, message):
    layouts = LayoutMap(mesh)
    layouts["kernel"] = ("model",)
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}"):
        layouts[key] = layout
    assert list(layouts) == ["kernel"]


def test_a_map_has_one_mesh(mesh):
    layouts, other = LayoutMap(mesh), DeviceMesh((2, 4), NAMES)
    with pytest.raises(
        ConfigError, match=r"the layout of 'a' is on <DeviceMesh shape=\(2, 4\).*, the map's on <.*4, 2"
    ):
        layouts["a"] = TensorLayout(("model",), other)
    with pytest.raises(
        ConfigError, match=r"^Expect `mesh` to be an instance of `DeviceMesh`. Received: mesh=None \(of"
    ):
        LayoutMap(None)


PATHS = st.text("ab/_1", min_size=1, max_size=6)
PATTERNS = st.one_of(PATHS, st.from_regex(r"\A([ab]|\.\*|_|[ab]\+|\[ab\]|1\?|/|\^|\$){1,5}\Z"))


@given(st.lists(PATTERNS, max_size=6, unique=True), PATHS, st.data())
def test_a_path_gets_the_layout_of_its_own_key_or_of_the_one_that_matches_it(keys, path, data):
    layouts = LayoutMap(DeviceMesh((1,), ["model"]))
    layout_by_key = {}
    for key in keys:
        layouts[key] = layout_by_key[key] = TensorLayout(data.draw(st.sampled_from([(), (None,), ("model",)])))
    matching = [layout for key, layout in layout_by_key.items() if re.fullmatch(key, path)]
    if path not in layout_by_key and len(matching) > 1:
        with pytest.raises(ConfigError, match=r"^Path '.*' matches multiple layout specification keys: \["):
            _ = layouts[path]
    else:
        expected = layout_by_key[path] if path in layout_by_key else matching[0] if matching else None
        assert layouts[path] is layouts.get(path) is expected
        assert (path in layouts) == (expected is not None)
    for key in keys:
        assert layouts[key] is layout_by_key[key]
    if keys:
        del layouts[keys[0]]
        assert list(layouts) == keys[1:]


def test_a_tensor_has_its_value_in_any_layout(mesh):
    layout = TensorLayout(("data", None), mesh)
    for tensor in (np.ones((4, 2)), dp.ops.ones((4, 2)), dp.Input((2,))):
        assert distribute_tensor(tensor, layout) is tensor
    with pytest.raises(ConfigError, match=r"^\('data',\) should be a TensorLayout type, got <class 'tuple'>$"):
        distribute_tensor(np.ones(4), ("data",))
