"""What the program's placement is told of the current distribution."""

import re

import numpy as np
import pytest

import dptrain as dp
from dptrain.distribution import DataParallel, DeviceMesh, LayoutMap, ModelParallel, set_distribution
from dptrain.distribution.placing import current_mesh, layout_of
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from dptrain.program.sharding.mesh import BATCH, Placement
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.conftest import ROOT
from tests.unit.distribution.conftest import Rows


def test_without_a_distribution_there_is_nothing_to_say(eight):
    assert current_mesh() is None
    assert layout_of(Variable([1.0])) is None


@pytest.mark.parametrize(
    ("shape", "names", "chosen", "expected"),
    [
        ((2, 4), ("rows", "model"), "rows", {BATCH: 2, "model": 4}),
        ((2, 4), ("model", "rows"), "rows", {"model": 2, BATCH: 4}),
        ((2, 4), ("model", BATCH), None, {"model": 2, BATCH: 4}),
        ((2, 4), ("model", "pipe"), None, {BATCH: 1, "model": 2, "pipe": 4}),
    ],
)
def test_the_axis_of_rows_has_the_name_that_programs_know(eight, shape, names, chosen, expected):
    with Rows(DeviceMesh(shape, names), chosen).scope():
        assert list(current_mesh().items()) == list(expected.items())


def test_layouts_of_weights_and_slots(eight):
    layouts = LayoutMap(DeviceMesh((2, 4), ["rows", "model"]))
    layouts[".*kernel"] = (None, "model")
    layouts[".*bias"] = ("rows",)
    layouts[".*filters"] = ("model",)
    kernel, bias, other = (
        Variable(np.ones(shape), f"dense/{name}")
        for name, shape in (("kernel", (3, 4)), ("bias", (4,)), ("scale", (4,)))
    )
    filters = Variable(np.ones((2, 3, 4)), "filters")
    with ModelParallel(layout_map=layouts).scope():
        assert [layout_of(weight) for weight in (kernel, bias, other)] == [(None, "model"), (BATCH,), (None,)]
        assert layout_of(filters) == ("model", None, None)
        # A slot lies as its weight does, whatever its own path says, unless its shape is another one.
        slot, row = Variable(np.ones((3, 4)), "adam/x"), Variable(np.ones(3), "adafactor/dense_kernel_r")
        assert layout_of(slot) == (None, None)
        assert layout_of(slot, slot_of=kernel) == (None, "model")
        assert layout_of(row, slot_of=kernel) == (None,)
        long = Variable(np.ones(3), "hidden/kernel")
        assert layout_of(long) == (None, "model")  # too many axes, which placement refuses
    with DataParallel().scope():
        assert layout_of(kernel) == (None, None)


def test_paths_of_a_model_and_its_optimizer(eight):
    layouts = LayoutMap(DeviceMesh((1, 8), ["batch", "model"]))
    layouts["hidden.*kernel"] = (None, "model")
    model = dp.Sequential([dp.Input((3,)), dp.layers.Dense(4, name="hidden"), dp.layers.Dense(2)])
    adam = dp.optimizers.Adam()
    adam.build(model.trainable_variables)
    with ModelParallel(layout_map=layouts).scope():
        layouts_of_weights = {weight._path: layout_of(weight) for weight in model.weights}
        of_slots = [layout_of(slot, weight) for weight in model.weights for slot in adam._slots_of(weight).values()]
    axes = [(None, "model"), (None,), (None, None), (None,)]
    assert layouts_of_weights == dict(
        zip(("hidden/kernel", "hidden/bias", "dense/kernel", "dense/bias"), axes, strict=True)
    )
    assert of_slots == [layout for layout in axes for _ in range(2)]


def test_placement_takes_layouts_as_they_are(eight):
    layouts = LayoutMap(DeviceMesh((2, 4), ["rows", "model"]))
    layouts[".*kernel"] = (None, "model")
    kernel, scale = Variable(np.ones((3, 4)), "dense/kernel"), Variable(np.ones(3), "dense/scale")
    program = trace(lambda x: {"y": (x * scale) @ kernel}, {"x": ((Dim.rows(8), 3), "float64")})
    with ModelParallel(layout_map=layouts).scope():
        placed = place(program, layouts={variable: layout_of(variable) for variable in program.state})
        assert placed.layouts == {kernel: Placement((None, "model"))}
        layouts[".*scale"] = (None, "model")
        with pytest.raises(ConfigError, match=r"^layout \(None, 'model'\) of 'dense/scale', of shape \(3,\): expected"):
            place(program, layouts={scale: layout_of(scale)})


def test_a_mesh_of_ranks_that_do_not_train_together(be):
    be(0, 2)
    set_distribution(DataParallel())
    be(0, 1)
    with pytest.raises(
        ConfigError, match=r"has 2 devices, but here 1 train together; call set_distribution\(None\) fi"
    ):
        current_mesh()


def test_a_mesh_with_the_axis_of_pipelines(be):
    be(0, 4)
    grid = DeviceMesh((2, 2), ["batch", "stage"])
    set_distribution(ModelParallel(layout_map=LayoutMap(grid), batch_dim_name="batch"))
    with pytest.raises(ConfigError, match=r"has an axis 'stage', a name that pipelines use: .*compile\(stages=2\)"):
        current_mesh()


def test_the_example_of_the_page(be):
    be(0, 2)
    page = (ROOT / "docs" / "distribution.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(example, "docs/distribution.md", "exec"), names)
    assert current_mesh() == {BATCH: 1, "model": 2}
    assert [layout_of(weight) for weight in names["model"].weights] == [
        *((None, "model"), ("model",)),
        *(("model", None), (None,)),
    ]
