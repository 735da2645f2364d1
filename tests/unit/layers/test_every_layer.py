"""Every layer: configurations, shapes, gradients, traces, and the same on several ranks."""

import json

import numpy as np
import pytest

from dptrain import layers, ops
from dptrain.errors import ConfigError
from dptrain.layers import LAYERS, Input
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.gradient import gradients
from dptrain.program.program import trace
from dptrain.program.shapes import without_rows
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import constant, differentiable, mask_of, with_mask
from dptrain.program.tree import leaves
from tests.sample import sample
from tests.unit.layers.cases import ALL_CASES, CASES, ON_HOST, ROWS, CellCase
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh, spread
from tests.unit.program.virtual_ranks import run_on_ranks

# A gradient of more elements is compared along as many random directions, which a wrong element changes as well.
FEW = 16

every_case = pytest.mark.parametrize(("name", "number"), ALL_CASES)
# Each layer as it is used most, in every run.
first_cases = pytest.mark.parametrize(
    ("name", "number"), [pytest.param(*case, marks=[pytest.mark.long] if case[1] else []) for case in ALL_CASES]
)


def built(name, number, dtype="float64"):
    case = CASES[name][number]
    layer = case.make()
    case.call(layer, [Input(tensor.shape[1:], dtype=tensor.dtype.name) for tensor in case.inputs()])
    layer._adopt(seed=3)
    layer._set_dtype(dtype)
    return case, layer


def rewound(layer):
    for variable in layer.variables:
        if variable.name == "seed_generator":
            variable.assign(0)
    return layer


def test_every_layer_has_cases():
    assert set(CASES) | ON_HOST == set(LAYERS)


@every_case
def test_configurations_come_back(name, number):
    layer = CASES[name][number].make()
    assert type(layer) is LAYERS[name]
    described = in_json(layers.serialize(layer))
    assert described["class_name"] == name
    restored = layers.deserialize(described)
    assert type(restored) is type(layer)
    assert in_json(restored.get_config()) == in_json(layer.get_config()) == described["config"]
    # Keras writes its own dtype policy beside them.
    described["config"]["dtype"] = {"class_name": "DTypePolicy", "config": {"name": "float32"}}
    assert in_json(layers.deserialize(described)._get_config()) == in_json(layer._get_config())


def in_json(config):
    """Return a configuration as a file gives it back: with lists for tuples."""
    return json.loads(json.dumps(config))


@every_case
def test_shapes_are_known_before_there_is_a_batch(name, number):
    case = CASES[name][number]
    layer = case.make()
    symbolic = [Input(tensor.shape[1:], dtype=tensor.dtype.name) for tensor in case.inputs()]
    output = case.call(layer, symbolic)
    assert without_rows(output.shape) == (None, *case.output)
    assert output.value is None
    assert output.history.layer is layer
    assert [id(tensor) for tensor in output.history.inputs] == [id(tensor) for tensor in symbolic]
    is_asked = layer.compute_output_shape.__func__ is layers.Layer.compute_output_shape and not case.integers
    if is_asked and not isinstance(case, CellCase):
        shapes = [(None, *shape) for shape in case.shapes] if isinstance(case.shapes, list) else (None, *case.shapes)
        assert layer.compute_output_shape(shapes) == (None, *case.output)
    assert repr(output).startswith("<tensor ")
    assert str((None, *case.output)) in repr(output)


@every_case
def test_outputs_have_shape_and_type(name, number):
    for dtype in ("float32", "float64"):
        case, layer = built(name, number, dtype)
        for rows in (ROWS, 1, 0):
            output = case.call(layer, case.inputs(rows), training=False)
            assert output.shape == (rows, *case.output)
            assert output.dtype == np.dtype(dtype)


@pytest.mark.sample(3)
@first_cases
@pytest.mark.parametrize("training", sample([True, False], 2))
def test_gradients_by_central_differences(name, number, training):
    case, layer = built(name, number)
    if training and case.moves:
        pytest.skip("the gradient is that of what stands still")
    arrays = case.inputs()
    directions = np.random.default_rng(3)
    pull = directions.normal(size=(ROWS, *case.output))

    def loss(inputs):
        value = ops.sum(case.call(rewound(layer), inputs, training=training) * pull)
        return sum(layer.losses, value)

    def assert_slopes(array, gradient, value, where):
        """Compare a gradient with differences: of each element where there are few, else along random directions."""
        steps = np.eye(array.size) if array.size <= FEW else directions.normal(size=(FEW, array.size))
        for step in steps.reshape(-1, *array.shape):
            slope = (value(array + 1e-6 * step) - value(array - 1e-6 * step)) / 2e-6
            terms = gradient * step
            close = 1e-7 * max(1, np.abs(step).sum()) + 1e-6 * np.abs(terms).sum()
            np.testing.assert_allclose(slope, terms.sum(), rtol=0, atol=close, err_msg=where)

    tensors = [differentiable(array) for array in arrays]
    total = loss(tensors)
    total.backward()
    for weight in layer.trainable_weights:
        original = weight.numpy()

        def moved(value, weight=weight):
            weight.assign(value)
            return float(loss(arrays))

        assert_slopes(original, weight.value.grad.numpy(), moved, weight.path)
        weight.assign(original)
    if case.integers:
        return
    for position, (array, gradient) in enumerate(zip(arrays, gradients(total, tensors), strict=True)):

        def shifted(value, position=position):
            return float(loss([value if n == position else array for n, array in enumerate(arrays)]))

        analytic = np.zeros_like(array) if gradient is None else gradient.numpy()
        assert_slopes(array, analytic, shifted, f"input {position}")


def program_of(case, layer):
    """Return a step with outputs, penalties, gradients and updates of a layer, and the values of its inputs."""
    values = {f"x{n}": tensor for n, tensor in enumerate(case.inputs())}

    def step(*inputs):
        y = case.call(layer, list(inputs), training=True)
        loss = sum(layer.losses, ops.sum(ops.square(y)))
        loss.backward()
        gradients = {f"d{n}": weight.value.grad for n, weight in enumerate(layer.trainable_weights)}
        return {"y": y, "loss": loss, **gradients}

    return trace(
        step, {name: ((Dim.rows(ROWS), *value.shape[1:]), value.dtype) for name, value in values.items()}
    ), values


@every_case
def test_a_trace_has_the_bits_of_eager_execution(name, number):
    case, layer = built(name, number, "float32")
    program, values = program_of(case, layer)
    before = [variable.numpy() for variable in layer.variables]
    values = {key: value if case.integers else value.astype(np.float32) for key, value in values.items()}
    program, _ = program_of(case, layer)
    for step in range(2):
        outputs, updates = evaluate(program, values)
        y = case.call(layer, list(values.values()), training=True)
        assert y.numpy().tobytes() == outputs["y"].astype(np.float32).tobytes()
        for variable, value in updates.items():
            assert variable.numpy().tobytes() == value.tobytes(), (variable.path, step)
    assert [array.shape for array in before] == [variable.shape for variable in layer.variables]


@pytest.mark.sample(3)
@first_cases
def test_ranks_compute_what_one_computes(name, number):
    """One, and several of which one has no rows; on a mesh with two ranks for each of them too."""
    case, layer = built(name, number)
    program, values = program_of(case, layer)
    output, updates = evaluate(program, values)
    placed, layouts = place(program), spread(program)
    for shards in ([ROWS], [0, 3, 2]):
        actual, _ = run_on_ranks(placed, values, shards, dict.fromkeys(values, 0))
        starts = np.cumsum([0, *shards])
        for rank, (outputs, moved) in enumerate(actual):
            for key, expected in output.items():
                expected_rows = expected[starts[rank] : starts[rank + 1]] if key == "y" else expected
                np.testing.assert_allclose(outputs[key], expected_rows, rtol=1e-12, atol=1e-12, err_msg=key)
            for variable, expected in updates.items():
                np.testing.assert_allclose(moved[variable], expected, rtol=1e-12, atol=1e-12, err_msg=variable.path)
        assert_same_on_mesh(program, values, layouts, VirtualMesh(shards, model=2))


@every_case
def test_weights_are_drawn_by_seed_and_position(name, number):
    _, first = built(name, number, "float32")
    _, second = built(name, number, "float32")
    for weight, other in zip(first.get_weights(), second.get_weights(), strict=True):
        assert weight.tobytes() == other.tobytes()
    for position, weight in enumerate(first.weights):
        initial = weight.initializer(weight.shape, 3, position).astype(np.float32)
        assert weight.numpy().tobytes() == initial.tobytes()
    assert first.count_params() == sum(weight.size for weight in first.get_weights())
    with pytest.raises(ConfigError, match="weight list of length"):
        first.set_weights([*first.get_weights(), np.zeros(1)])
    assert len(leaves(first.losses)) == len(
        [weight for weight in first.trainable_weights if weight.regularizer is not None]
    ), "what the symbolic call added is gone"


# Softmax takes a mask of all its numbers, the other has the channels in the place of the steps.
OTHER_MASKS = ("Softmax", 1), ("Softmax", 2), ("GlobalAveragePooling1D", 1)


def takes_sequences(name, number):
    case = CASES[name][number]
    is_other = case.integers or isinstance(case, CellCase) or (name, number) in OTHER_MASKS
    return not is_other and all(x.ndim == 3 for x in case.inputs())


@pytest.mark.filterwarnings("ignore:.* destroy the mask")
@pytest.mark.parametrize(("name", "number"), [case for case in ALL_CASES if takes_sequences(*case)])
def test_a_mask_that_goes_on_is_one_of_the_output(name, number):
    """Its lengths are those of the output's first axes, whatever the layer has made of the axes of its inputs."""
    case = CASES[name][number]
    masked = [
        with_mask(constant(x), constant(np.arange(x.shape[1]) < np.arange(1, len(x) + 1)[:, None]))
        for x in case.inputs()
    ]
    for output in leaves(case.call(case.make(), masked, training=False)):
        mask = mask_of(output)
        assert mask is None or mask.shape == output.shape[: mask.ndim]
