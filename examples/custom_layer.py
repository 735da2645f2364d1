"""A custom layer built from existing ops: a residual gated linear unit, checked and trained.

    python examples/custom_layer.py
    mpirun -n 2 python examples/custom_layer.py

Source: Y. Dauphin et al., "Language modeling with gated convolutional networks", ICML 2017.
"""

import argparse

import numpy as np

import dptrain as dp
from dptrain import ops


class ResidualGate(dp.layers.Layer):
    """y = x + (x @ value + bias) * sigmoid(x @ gate), of x's shape (rows, features)."""

    def build(self, input_shape):
        features = input_shape[-1]
        self.value = self.add_weight((features, features), "glorot_uniform", name="value")
        self.bias = self.add_weight((features,), "zeros", name="bias")
        self.gate = self.add_weight((features, features), "glorot_uniform", name="gate")

    def call(self, inputs):
        return inputs + (inputs @ self.value + self.bias) * ops.sigmoid(inputs @ self.gate)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()

    compared = dp.testing.check_layer(ResidualGate(), (7,), device=arguments.device)

    x = np.random.default_rng(0).standard_normal((1000, 8))
    y = (x[:, 0] * x[:, 1] > 0).astype(np.uint8)  # no linear model can learn it
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
