"""Two models trained in turn inside one `train_step`: a generator learns a distribution from a discriminator.

    python examples/gan.py
    mpirun -n 2 python examples/gan.py

prints the same numbers. The data are points around a circle; losses are least squares, so that the discriminator's
aim is 1 for data and 0 for what the generator makes. Source: X. Mao et al., "Least squares generative adversarial
networks", ICCV 2017, with a = 0 and b = c = 1.
"""

import argparse

import numpy as np

import dptrain as dp

LATENT = 4
DISCRIMINATOR_STEPS = 2


class Gan(dp.Sequential):
    """A discriminator (its own layers) that trains a generator as well.

    Args:
        layers: of the discriminator; it ends in one output.
        generator: from (rows, LATENT) to samples.
        seed: of weights, shuffling and noise.
    """

    def __init__(self, layers, generator, seed=0):
        super().__init__(layers, name="gan", seed=seed)
        self.generator = generator
        self.d_loss = dp.metrics.MeanTracker("d_loss")
        self.g_loss = dp.metrics.MeanTracker("g_loss")

    def train_step(self, data):
        """Update the discriminator several times, then the generator once."""
        for _ in range(DISCRIMINATOR_STEPS):
            self.learn(data.x, 1.0)
            self.learn(self.make(data), 0.0)  # its gradient adds to the one before
            self.apply_gradients()  # divides by the rows of one pass: the sum of two means

        loss, dy = self.judge(self.make(data), 1.0)
        self.g_loss.update_state(loss, data.rows)
        # The discriminator only passes the gradient on.
        self.generator.backward(self.backward(dy, input_gradient=True, frozen=True))
        self.generator.apply_gradients()
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def make(self, data):
        """Return as many generated samples as this rank has data."""
        noise = self.random_normal("noise", data.rows, LATENT, data.first_row)
        return self.generator.forward(noise, training=True)

    def judge(self, x, aim):
        """Return the discriminator's loss on x, and its gradient in the output."""
        y_pred = self.forward(x, training=True)
        y = self.buffer("aim", y_pred.shape)
        self.ops.fill(y, aim)
        return self.compute_loss(x, y, y_pred)

    def learn(self, x, aim):
        """Add the gradient of the loss on x to the discriminator's."""
        loss, dy = self.judge(x, aim)
        self.d_loss.update_state(loss, len(x))
        self.backward(dy)


def main() -> None:
    """Train, and print what the generator makes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--samples", type=int, default=4000)
    arguments = parser.parse_args()
    options = {"device": arguments.device, "dtype": arguments.dtype}

    rng = np.random.default_rng(0)
    angle = rng.uniform(0, 2 * np.pi, arguments.samples)
    x = np.stack([2 + np.cos(angle), np.sin(angle) - 1], axis=1) + 0.05 * rng.standard_normal((arguments.samples, 2))

    generator = dp.Sequential([dp.layers.Dense(32, "tanh", input_shape=(LATENT,)), dp.layers.Dense(2)], seed=1)
    generator.compile(dp.optimizers.Adam(1e-3, beta_1=0.5), **options)
    judging = [dp.layers.Dense(32, "tanh", input_shape=(2,)), dp.layers.Dense(32, "tanh"), dp.layers.Dense(1)]
    gan = Gan(judging, generator)
    gan.compile(dp.optimizers.Adam(2e-3, beta_1=0.5), "mse", **options)
    history = gan.fit(x, batch_size=50, epochs=arguments.epochs, verbose=0)

    made = generator.predict(np.random.default_rng(1).standard_normal((2000, LATENT)), verbose=0)
    if dp.rank() == 0:
        for epoch in range(0, arguments.epochs, max(arguments.epochs // 4, 1)):
            print(f"epoch {epoch + 1}:", *(f"{name} {values[epoch]:.3f}" for name, values in history.history.items()))
        print("mean of data", x.mean(0).round(2), "of made samples", made.mean(0, np.float64).round(2))
        print("deviation of data", x.std(0).round(2), "of made samples", made.std(0, np.float64).round(2))


if __name__ == "__main__":
    main()
