"""A custom op: a CUDA kernel, its NumPy reference and its gradient, checked and used in a layer.

    python examples/custom_op.py
    mpirun -n 2 python examples/custom_op.py
    python examples/custom_op.py --device cuda

The op is swish(x) = x sigmoid(beta x). Source: P. Ramachandran et al., "Searching for activation functions", 2017.
"""

import argparse

import numpy as np

import dptrain as dp

SOURCE = r"""
// swish_forward: y[i] = x[i] s, swish_backward: dx[i] = dy[i] (s + beta x[i] s (1 - s)), where s = sigmoid(beta x[i]).
// Grid-stride over size, any block. tanh never overflows, where exp would.
__device__ float sigmoid(float x) { return 0.5f * tanhf(0.5f * x) + 0.5f; }

extern "C" __global__ void swish_forward(const float *x, float *y, long long size, float beta) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += step)
        y[i] = x[i] * sigmoid(beta * x[i]);
}

extern "C" __global__ void swish_backward(const float *x, const float *dy, float *dx, long long size, float beta) {
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x; i < size; i += step) {
        const float s = sigmoid(beta * x[i]);
        dx[i] = dy[i] * (s + beta * x[i] * s * (1.0f - s));
    }
}
"""


def sigmoid(x):
    return 0.5 * np.tanh(0.5 * x) + 0.5


# Pointers to x and y, the number of elements (long long) and beta (float): P, P, q, f.
@dp.ops.op(source=SOURCE, kernel="swish_forward", arguments="PPqf")
def swish(x, y, *, beta):
    """y = x sigmoid(beta x)."""
    y[...] = x * sigmoid(beta * x)


@swish.gradient(kernel="swish_backward", arguments="PPPqf")
def swish_gradient(x, dy, dx, *, beta):
    """dx = dy (s + beta x s (1 - s)) with s = sigmoid(beta x)."""
    s = sigmoid(beta * x)
    dx[...] = dy * (s + beta * x * s * (1 - s))


class Swish(dp.layers.Layer):
    """The op as a layer."""

    def __init__(self, beta=1.0, **options):
        super().__init__(**options)
        self.beta = beta

    def call(self, inputs):
        return swish(inputs, beta=self.beta)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--epochs", type=int, default=8)
    arguments = parser.parse_args()

    for shape in ((1,), (7, 13), (1031,)):
        compared = dp.testing.check_op(swish, shape, beta=1.5, device=arguments.device)

    rng = np.random.default_rng(0)
    x = rng.uniform(-2, 2, (1000, 2))
    y = np.sin(2 * x[:, :1]) * x[:, 1:]
    model = dp.Sequential(
        [dp.layers.Dense(32, input_shape=(2,)), Swish(1.5), dp.layers.Dense(32), Swish(), dp.layers.Dense(1)], seed=1
    )
    model.compile(dp.optimizers.Adam(0.01), "mse", device=arguments.device)
    history = model.fit(x, y, epochs=arguments.epochs, verbose=0)
    if dp.rank() == 0:
        print("checked:", ", ".join(compared))
        for name, values in history.history.items():
            print(f"{name}: {values[0]:.3f} -> {values[-1]:.3f}")


if __name__ == "__main__":
    main()
