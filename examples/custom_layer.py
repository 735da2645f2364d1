"""A layer of your own from the ops that are there: a residual gated linear unit, checked and trained.

    python examples/custom_layer.py
    mpirun -n 2 python examples/custom_layer.py

Source: Y. Dauphin et al., "Language modeling with gated convolutional networks", ICML 2017.
"""

import argparse

import numpy as np
from dptrain.params import ParamSpec

import dptrain as dp
from dptrain import initializers


class ResidualGate(dp.layers.Layer):
    """y = x + (x @ value + bias) * sigmoid(x @ gate), of x's shape (rows, features)."""

    def output_shape(self, input_shape):
        return input_shape

    def param_specs(self, input_shape):
        (features,) = input_shape
        glorot = initializers.get("glorot_uniform")
        return [
            ParamSpec("value", (features, features), glorot),
            ParamSpec("bias", (features,), initializers.get("zeros")),
            ParamSpec("gate", (features, features), glorot),
        ]

    def scratch_shapes(self, input_shape):
        """What lives from forward to backward besides x and y: layers never allocate."""
        return {"values": input_shape, "gates": input_shape, "part": input_shape}

    def forward(self, ops, buffers, context):
        params, kept = buffers.params, buffers.scratch
        ops.dense_forward(buffers.x, params["value"], params["bias"], "linear", kept["values"])
        ops.dense_forward(buffers.x, params["gate"], None, "sigmoid", kept["gates"])
        ops.multiply(kept["values"], kept["gates"], buffers.y)
        ops.add(buffers.x, buffers.y)

    def backward(self, ops, buffers, context):
        params, grads, kept, dy = buffers.params, buffers.grads, buffers.scratch, buffers.dy
        x, dx = buffers.x, buffers.dx
        part = None if dx is None else kept["part"]
        values, gates = kept["values"], kept["gates"]
        if dx is not None:
            ops.copy(dy, dx)  # of the sum's first term
        # dense_backward overwrites the gradient that it is given by the one before the activation, and writes its dx:
        # first both factors get their gradients, in each other's memory.
        ops.multiply(dy, values, values)  # of the gates
        ops.multiply(dy, gates, dy)  # of the values
        ops.dense_backward(x, params["gate"], gates, values, "sigmoid", grads["gate"], None, part)
        if dx is not None:
            ops.add(part, dx)
        ops.dense_backward(x, params["value"], gates, dy, "linear", grads["value"], grads["bias"], part)
        if dx is not None:
            ops.add(part, dx)

    def own_config(self):
        return {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()

    compared = dp.testing.check_layer(ResidualGate(), (7,), device=arguments.device)

    x = np.random.default_rng(0).standard_normal((1000, 8))
    y = (x[:, 0] * x[:, 1] > 0).astype(np.uint8)  # no linear model finds it
    model = dp.Sequential(
        [dp.layers.Dense(16, input_shape=(8,)), ResidualGate(), ResidualGate(), dp.layers.Dense(2, "softmax")], seed=1
    )
    model.compile(
        dp.optimizers.Adam(0.005), "sparse_categorical_crossentropy", metrics=["accuracy"], device=arguments.device
    )
    history = model.fit(x, y, epochs=arguments.epochs, verbose=0)
    if dp.rank() == 0:
        print("checked:", ", ".join(compared))
        for name, values in history.history.items():
            print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")


if __name__ == "__main__":
    main()
