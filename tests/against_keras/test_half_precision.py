"""Layers and trainings in half precision, against Keras on PyTorch: the types, and the numbers but for rounding."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops

POLICIES = {"mixed_bfloat16": 2.0**-8, "mixed_float16": 2.0**-11, "bfloat16": 2.0**-8, "float16": 2.0**-11}
LAYERS = {
    "Dense": ((5, 7), {"units": 4, "activation": "gelu"}),
    "Dense with softmax": ((5, 7), {"units": 4, "activation": "softmax"}),
    "Conv2D": ((2, 8, 8, 3), {"filters": 4, "kernel_size": 3, "activation": "relu"}),
    "Conv2DTranspose": ((2, 5, 5, 3), {"filters": 4, "kernel_size": 3, "strides": 2}),
    "BatchNormalization": ((6, 5), {}),
    "LayerNormalization": ((6, 5), {}),
    "MaxPooling2D": ((2, 8, 8, 3), {}),
    "AveragePooling2D": ((2, 8, 8, 3), {"pool_size": 2}),
    "UpSampling2D": ((2, 3, 3, 2), {}),
    "Softmax": ((4, 9), {}),
    "Rescaling": ((4, 9), {"scale": 1 / 3}),
    "Embedding": ((3, 4), {"input_dim": 9, "output_dim": 4}),
    **{
        f"Activation {activation}": ((4, 9), {"activation": activation})
        for activation in ("silu", "sigmoid", "tanh", "mish", "selu")
    },
}


def units(outputs, expected, last_place):
    """Return by how many units in the last place numbers differ; small ones count as a tenth of the largest."""
    size = np.abs(expected) + np.abs(expected).max() / 10 + 1e-9
    return np.max(np.abs(outputs - expected) / size) / last_place


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LAYERS)
def test_layers(torch_keras, name, policy):
    import torch

    shape, arguments = LAYERS[name]
    kind, rng, last_place = name.split()[0], np.random.default_rng(0), POLICIES[policy]
    last_place *= 3 if "Conv" in name and "float16" in policy else 1  # PyTorch rounds float16 on its way
    torch_keras.utils.set_random_seed(0)
    theirs = getattr(torch_keras.layers, kind)(dtype=policy, **arguments)
    ours = getattr(dp.layers, kind)(dtype=policy, **arguments)
    x = rng.integers(0, 9, shape) if kind == "Embedding" else rng.normal(size=shape).astype(np.float32)
    torch_input, dp_input = torch.tensor(x, requires_grad=x.dtype == np.float32), dp.Variable(x)
    training = {"training": True} if kind == "BatchNormalization" else {}
    expected = theirs(torch_input, **training)
    ours.build(x.shape)
    assert [weight.dtype.name for weight in ours.weights] == [
        str(weight.dtype).split(".")[-1] for weight in theirs.weights
    ]
    for weight, their_weight in zip(ours.weights, theirs.weights, strict=True):
        weight.assign(their_weight.value.detach().float().numpy())
    output = ours(dp_input, **training)
    assert output.dtype.name == str(expected.dtype).split(".")[-1]
    assert units(output.numpy().astype("f"), expected.detach().float().numpy(), last_place) < 4
    slope = rng.normal(size=output.shape).astype(np.float32)
    (expected.float() * torch.tensor(slope)).sum().backward()
    ops.sum(ops.cast(output, "float32") * slope).backward()
    weight_pairs = zip(ours.trainable_weights, theirs.trainable_weights, strict=True)
    pairs = [
        *((weight.value.grad, their_weight.value.grad) for weight, their_weight in weight_pairs),
        (dp_input.value.grad, torch_input.grad),
    ]
    for value, reference in pairs[: None if torch_input.requires_grad else -1]:
        # PyTorch differentiates these by their rounded outputs.
        assert units(value.numpy().astype("f"), reference.float().numpy(), last_place) < (
            12 if "tanh" in name or "softmax" in name else 5
        )


def losses(library, policy, weights, x, y, **options):
    layers = library.layers
    model = library.Sequential(
        [
            library.Input((20,)),
            layers.Dense(64, activation="relu", dtype=policy),
            layers.BatchNormalization(dtype=policy),
            layers.Dense(32, activation="gelu", dtype=policy),
            layers.Dense(5, dtype=policy),
            layers.Activation("softmax", dtype="float32"),
        ]
    )
    if weights is not None:
        model.set_weights(weights)
    model.compile(library.optimizers.Adam(1e-3), "sparse_categorical_crossentropy", **options)
    losses_of_runs = []
    for step in range(200):
        part = slice(step % 40 * 50, step % 40 * 50 + 50)
        losses_of_runs.append(float(model.train_on_batch(x[part], y[part])))
    return np.array(losses_of_runs)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16"])
def test_200_steps_within_what_rounding_alone_makes(torch_keras, policy):
    """Twice as far apart at most as two of our trainings whose first weights differ by a millionth."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2000, 20)).astype(np.float32)
    y = np.argmax(np.tanh(x @ rng.normal(size=(20, 5))) + 0.3 * rng.normal(size=(2000, 5)), 1)
    dp.utils.set_random_seed(1)
    start = dp.Sequential([dp.Input((20,)), dp.layers.Dense(64), dp.layers.BatchNormalization(), dp.layers.Dense(32)])
    start.add(dp.layers.Dense(5))
    weights = [np.asarray(weight) for weight in start.get_weights()]
    nearby = [weight * (1 + 1e-6 * rng.normal(size=weight.shape)).astype(np.float32) for weight in weights]
    ours, beside = (losses(dp, policy, initial, x, y, device="cpu") for initial in (weights, nearby))
    theirs = losses(torch_keras, policy, weights, x, y)
    assert np.abs(ours - theirs).max() < 2 * np.abs(ours - beside).max()
