"""Options of losses drawn together: values and gradients beside Keras, by PyTorch's autograd."""

import itertools
import random

import numpy as np
import pytest

import dptrain as dp
from dptrain.program.gradient import gradients
from dptrain.program.tensor import differentiable, with_mask

# Of Keras' own copies of its variables.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
ROWS, STEPS, CLASSES = 5, 3, 4
RNG = np.random.default_rng(11)
Z = RNG.standard_normal((ROWS, STEPS, CLASSES))
LABELS = RNG.integers(0, CLASSES, (ROWS, STEPS))
TARGETS = {
    "labels": LABELS,
    "one-hot": np.eye(CLASSES)[LABELS],
    "shares": RNG.dirichlet(np.ones(CLASSES), (ROWS, STEPS)),
    "binary": RNG.integers(0, 2, Z.shape).astype("float64"),
    "signs": RNG.choice([-1.0, 1.0], Z.shape),
    "values": RNG.standard_normal(Z.shape),
    "positive": RNG.random(Z.shape) + 0.1,
}
OUTPUTS = {
    "softmax": lambda ops, z: ops.softmax(z, axis=-1),
    "sigmoid": lambda ops, z: ops.sigmoid(z),
    "linear": lambda ops, z: z * 1.0,
    "positive": lambda ops, z: ops.exp(z),
}
WEIGHTS, MASK = RNG.random((ROWS, STEPS)) * 2, RNG.random((ROWS, STEPS)) < 0.6
REDUCTIONS = ["sum_over_batch_size", "mean", "mean_with_sample_weight", "sum", "none", None]

ENTROPY = {"from_logits": [False, True], "label_smoothing": [0.0, 0.1, 1.0], "axis": [-1]}
FOCAL = {"gamma": [0.0, 1.0, 2.5], "alpha": [0.25, 0.9]}
# Targets, outputs and options of each class; outputs are logits where `from_logits` is drawn.
CLASSES_OF_LOSSES = {
    "MeanSquaredError": (["values"], ["linear"], {}),
    "MeanAbsoluteError": (["values"], ["linear"], {}),
    "MeanAbsolutePercentageError": (["values", "positive"], ["linear"], {}),
    "MeanSquaredLogarithmicError": (["values", "positive"], ["linear", "positive"], {}),
    "LogCosh": (["values"], ["linear"], {}),
    "Huber": (["values"], ["linear"], {"delta": [0.3, 1.0, 5.0]}),
    "CosineSimilarity": (["values"], ["linear"], {"axis": [-1, -2, 1]}),
    "Hinge": (["binary", "signs"], ["linear"], {}),
    "SquaredHinge": (["binary", "signs"], ["linear"], {}),
    "CategoricalHinge": (["one-hot", "shares"], ["linear"], {}),
    "KLDivergence": (["shares", "one-hot"], ["softmax", "sigmoid"], {}),
    "Poisson": (["positive", "binary"], ["positive", "sigmoid"], {}),
    "BinaryCrossentropy": (["binary", "shares"], ["sigmoid", "softmax"], ENTROPY),
    "CategoricalCrossentropy": (["one-hot", "shares"], ["softmax", "sigmoid"], ENTROPY | {"axis": [-1, 1, 2]}),
    "SparseCategoricalCrossentropy": (
        ["labels"],
        ["softmax", "sigmoid"],
        {"from_logits": [False, True], "ignore_class": [None, 0, 2, -1], "axis": [-1]},
    ),
    "BinaryFocalCrossentropy": (
        ["binary"],
        ["sigmoid", "softmax"],
        ENTROPY | FOCAL | {"apply_class_balancing": [False, True]},
    ),
    "CategoricalFocalCrossentropy": (["one-hot", "shares"], ["softmax", "sigmoid"], ENTROPY | FOCAL),
    "CategoricalGeneralizedCrossEntropy": (["labels"], ["softmax"], {"q": [0.2, 0.5, 0.9]}),
    "Dice": (["binary", "shares"], ["sigmoid", "softmax"], {"axis": [None, -1, 1, (1, 2), (0, 1)]}),
    "Tversky": (
        ["binary", "shares"],
        ["sigmoid", "softmax"],
        {"alpha": [0.3, 1.0], "beta": [0.5, 0.0], "axis": [None, -1, (1, 2)]},
    ),
}
# Shapes of these losses are not those of samples.
WHOLE = ("Dice", "Tversky")


def drawn(name, number):
    """Return a draw of all options of a loss together: targets, outputs, arguments, weights and mask."""
    choose = random.Random(f"{name} {number}").choice
    targets, outputs, options = CLASSES_OF_LOSSES[name]
    arguments = {key: choose(values) for key, values in options.items()} | {"reduction": choose(REDUCTIONS)}
    outputs = "linear" if arguments.get("from_logits") else choose(outputs)
    weights = None if name in WHOLE else choose([None, 0.7, WEIGHTS, WEIGHTS * (WEIGHTS > 1)])
    mask = None if name in WHOLE or "CosineSimilarity" in name else choose([None, MASK, np.zeros_like(MASK)])
    if isinstance(weights, float):  # Keras on PyTorch fails beside a mask
        mask = None
        weights = weights if arguments.get("ignore_class") is None else WEIGHTS
        if arguments["reduction"] == "mean_with_sample_weight":
            arguments["reduction"] = "mean"  # Keras divides the sum by the number
    if arguments.get("axis") in (1, -2):  # samples are not those of weights and mask
        weights, mask = weights if isinstance(weights, float) else None, None
        if "label_smoothing" in arguments:
            arguments["label_smoothing"] = 0.0  # Keras divides by the length of the last axis
    return TARGETS[choose(targets)], outputs, arguments, weights, mask


def of_keras(keras, loss, target, outputs, weights, mask):
    """Return a loss's values and the gradient of their weighted sum."""
    z = keras.ops.convert_to_tensor(Z).requires_grad_()
    y_pred = OUTPUTS[outputs](keras.ops, z)
    if mask is not None:
        y_pred._keras_mask = keras.ops.convert_to_tensor(mask)
    values = loss(target, y_pred, sample_weight=weights)
    slopes = keras.ops.convert_to_tensor(np.cos(np.arange(values.numel())).reshape(values.shape))
    (values * slopes).sum().backward()
    return values.detach().numpy(), z.grad.numpy()


def of_dptrain(loss, target, outputs, weights, mask):
    z = differentiable(Z)
    y_pred = OUTPUTS[outputs](dp.ops, z)
    if mask is not None:
        y_pred = with_mask(y_pred, dp.ops.convert_to_tensor(mask))
    values = loss(target, y_pred, sample_weight=weights)
    slopes = np.cos(np.arange(dp.ops.size(values))).reshape(values.shape)
    (gradient,) = gradients(dp.ops.sum(values * slopes), [z])
    return values.numpy(), gradient.numpy()


@pytest.mark.parametrize("name", CLASSES_OF_LOSSES)
def test_options_together(torch_keras, name):
    for number in range(40):
        target, outputs, arguments, weights, mask = drawn(name, number)
        case = (target, outputs, weights, mask)
        expected = of_keras(torch_keras, getattr(torch_keras.losses, name)(**arguments), *case)
        results = of_dptrain(getattr(dp.losses, name)(**arguments), *case)
        message = f"{arguments}, {outputs}, weights: {weights is not None}, mask: {mask is not None}"
        for result, reference in zip(results, expected, strict=True):
            np.testing.assert_allclose(result, reference, rtol=1e-12, atol=1e-13, err_msg=message)


# Losses among the ops, with their options.
OPS = {
    "binary_crossentropy": (["binary", "shares"], ["sigmoid", "softmax"], {"from_logits": [False, True]}),
    "categorical_crossentropy": (
        ["one-hot", "shares"],
        ["softmax", "sigmoid"],
        {"from_logits": [False, True], "axis": [-1, 1]},
    ),
    "sparse_categorical_crossentropy": (
        ["labels"],
        ["softmax", "sigmoid"],
        {"from_logits": [False, True], "axis": [-1, 2]},
    ),
}


@pytest.mark.parametrize("name", OPS)
def test_ops(torch_keras, name):
    targets, outputs, options = OPS[name]
    for target, output, *values in itertools.product(targets, outputs, *options.values()):
        arguments = dict(zip(options, values, strict=True))
        case = TARGETS[target], "linear" if arguments["from_logits"] else output, None, None

        def loss(k, arguments=arguments):
            return lambda y, z, sample_weight: getattr(k.ops, name)(k.ops.convert_to_tensor(y), z, **arguments)

        for result, reference in zip(
            of_dptrain(loss(dp), *case), of_keras(torch_keras, loss(torch_keras), *case), strict=True
        ):
            np.testing.assert_allclose(result, reference, rtol=1e-12, atol=1e-13, err_msg=str(arguments))


@pytest.mark.parametrize("name", sorted({name for name in CLASSES_OF_LOSSES} - {"CategoricalGeneralizedCrossEntropy"}))
def test_functions(torch_keras, name):
    """Of a class's name in snake case: each sample's loss, without reduction."""
    from dptrain.registry.names import snake_case

    function = snake_case(name)
    for number in range(10):
        target, outputs, arguments, _, _ = drawn(name, number)
        arguments.pop("reduction")
        if arguments.get("apply_class_balancing") is False:
            arguments.pop("alpha")
        case = (target, outputs, None, None)

        def loss(k, arguments=arguments):
            called = getattr(k.losses, function)
            return lambda y, z, sample_weight: called(k.ops.convert_to_tensor(y), z, **arguments)

        for result, reference in zip(
            of_dptrain(loss(dp), *case), of_keras(torch_keras, loss(torch_keras), *case), strict=True
        ):
            np.testing.assert_allclose(result, reference, rtol=1e-12, atol=1e-13, err_msg=str(arguments))


def test_every_loss_is_drawn():
    others = {"Loss", "LossFunctionWrapper", "CTC", "Circle"}  # with targets of their own, in other tests
    assert {cls.__name__ for cls in dp.losses.LOSSES.values()} - others == set(CLASSES_OF_LOSSES)
