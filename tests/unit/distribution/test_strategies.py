"""What is divided: rows alone, or variables too."""

import re

import pytest

from dptrain.distribution import (
    DataParallel,
    DeviceMesh,
    LayoutMap,
    ModelParallel,
    distribution,
    list_devices,
    set_distribution,
)
from dptrain.errors import ConfigError
from dptrain.program.tensor import Variable
from tests.unit.distribution.conftest import Rows


@pytest.fixture
def layouts(eight) -> LayoutMap:
    layout_map = LayoutMap(DeviceMesh((2, 4), ["rows", "model"]))
    layout_map["dense.*kernel"] = (None, "model")
    return layout_map


@pytest.mark.parametrize("make", [DataParallel, lambda: DataParallel(devices=list_devices())])
def test_data_parallel(eight, make):
    strategy = make()
    assert (strategy.device_mesh._lengths, strategy.batch_dim_name) == ({"batch": 8}, "batch")
    assert (strategy.num_processes, strategy.num_model_replicas, strategy.data_shard_id) == (8, 8, 0)
    assert strategy.get_data_layout((32, 28, 28)).axes == ("batch", None, None)
    assert strategy.get_data_layout(()).axes == ()
    assert strategy.get_variable_layout(Variable([[1.0]])).axes == (None, None)
    assert strategy.get_variable_layout(Variable([[1.0]])).device_mesh is strategy.device_mesh
    assert strategy.get_tensor_layout("dense/output") is None
    assert repr(strategy) == f"<DataParallel device_mesh={strategy.device_mesh}>"
    data = object()
    assert strategy.distribute_dataset(data) is data


def test_data_parallel_on_a_mesh_of_its_own(eight):
    assert DataParallel(DeviceMesh((8,), ["rows"])).batch_dim_name == "rows"
    with pytest.warns(UserWarning, match=r"1D, but received mesh.devices.ndim=2. The first axis will be used for"):
        strategy = DataParallel(DeviceMesh((4, 2), ["rows", "other"]))
    assert (strategy.batch_dim_name, strategy.num_model_replicas) == ("rows", 4)
    with pytest.raises(
        ConfigError, match=r"^Expect `mesh` to be an instance of `DeviceMesh`. Received: mesh=\['cpu:0'"
    ):
        DataParallel(list_devices())


def test_model_parallel(layouts):
    strategy = ModelParallel(layout_map=layouts)
    assert (strategy.batch_dim_name, strategy.num_model_replicas, strategy.device_mesh) == (
        "rows",
        2,
        layouts.device_mesh,
    )
    assert ModelParallel(layout_map=layouts, batch_dim_name="model").num_model_replicas == 4
    kernel, bias = Variable([[1.0]], "dense_1/kernel"), Variable([1.0], "dense_1/bias")
    assert strategy.get_variable_layout(kernel) is layouts["dense.*kernel"]
    assert strategy.get_variable_layout(bias).axes == (None,)
    assert strategy.get_tensor_layout("dense_1/kernel") is layouts["dense.*kernel"]
    assert strategy.get_tensor_layout("dense_1/output") is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "You must specify a layout_map argument."),
        ({"layout_map": {}}, "Argument `layout_map` must be a `LayoutMap` instance. Received: layout_map={}"),
    ],
)
def test_model_parallel_without_a_map(options, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        ModelParallel(**options)


def test_the_axis_of_rows_is_one_of_the_mesh(layouts):
    with pytest.raises(
        ConfigError, match=r"^batch_dim_name = 'row': expected an axis of the mesh, \['rows', 'model'\]$"
    ):
        ModelParallel(layout_map=layouts, batch_dim_name="row")
    with pytest.raises(
        ConfigError, match=r"^not supported: batch_dim_name='model' on a mesh that also has an axis 'batch'"
    ):
        Rows(DeviceMesh((2, 4), ["batch", "model"]), "model")


@pytest.mark.parametrize(
    ("shape", "names", "chosen", "shards"),
    [
        ((2, 4), ("batch", "model"), None, [0, 0, 0, 0, 1, 1, 1, 1]),
        ((4, 2), ("model", "rows"), "rows", [0, 1, 0, 1, 0, 1, 0, 1]),
        ((8,), ("model",), None, [0] * 8),
    ],
)
def test_which_part_of_a_batch_a_rank_has(be, shape, names, chosen, shards):
    shards_of_ranks = []
    for rank in range(8):
        be(rank, 8)
        strategy = Rows(DeviceMesh(shape, names), chosen)
        shards_of_ranks.append(strategy.data_shard_id)
    assert shards_of_ranks == shards
    assert strategy.num_model_replicas == max(shards) + 1


def test_every_rank_is_given_the_same_batches(be):
    assert DataParallel(auto_shard_dataset=False).auto_shard_dataset is False
    be(0, 2)
    with pytest.raises(ConfigError, match=r"^not supported: auto_shard_dataset=False: every rank gets the same"):
        DataParallel(auto_shard_dataset=False)
    strategy = DataParallel()
    with pytest.raises(ConfigError, match=r"^not supported: auto_shard_dataset=False: "):
        strategy.auto_shard_dataset = False
    assert strategy.auto_shard_dataset


def test_the_current_distribution():
    first, second = DataParallel(), DataParallel()
    assert distribution() is None
    set_distribution(first)
    assert distribution() is first
    with second.scope():
        assert distribution() is second
    assert distribution() is first
    with pytest.raises(KeyError), second.scope():
        raise KeyError
    assert distribution() is first
    with pytest.raises(ConfigError, match=r"^set_distribution: expected a Distribution or None. Received: <DeviceMesh"):
        set_distribution(first.device_mesh)
    set_distribution(None)
    assert distribution() is None
