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


class Gan(dp.Model):
    """A discriminator and a generator that are trained in turn.

    Args:
        discriminator: from samples to one number.
        generator: from (rows, LATENT) to samples.
        seed: of shuffling and noise.
    """

    def __init__(self, discriminator, generator, seed=0):
        super().__init__(name="gan", seed=seed)
        self.discriminator, self.generator = discriminator, generator
        self.noise = dp.ops.random.SeedGenerator(seed)
        self.d_loss = dp.metrics.Mean("d_loss")
        self.g_loss = dp.metrics.Mean("g_loss")

    def call(self, inputs):
        return self.discriminator(inputs)

    def compile(self, d_optimizer, g_optimizer, **options):
        super().compile(d_optimizer, **options)
        self.g_optimizer = g_optimizer

    def train_step(self, data):
        """Update the discriminator several times, then the generator once."""
        rows = data.shape[0]
        for _ in range(DISCRIMINATOR_STEPS):
            loss = self.distance(data, 1.0) + self.distance(self.make(rows), 0.0)
            self.update(self.optimizer, loss, self.discriminator)
            self.d_loss.update_state(loss, sample_weight=rows)

        loss = self.distance(self.make(rows), 1.0)
        self.update(self.g_optimizer, loss, self.generator)
        self.g_loss.update_state(loss, sample_weight=rows)
        return {"d_loss": self.d_loss.result(), "g_loss": self.g_loss.result()}

    def make(self, rows):
        """Return generated samples."""
        noise = dp.ops.random.normal((rows, LATENT), dtype=self.dtype, seed=self.noise)
        return self.generator(noise, training=True)

    def distance(self, x, aim):
        """Return the mean squared distance of the discriminator's outputs from what they are to be."""
        return dp.ops.mean(dp.ops.square(self.discriminator(x, training=True) - aim))

    def update(self, optimizer, loss, model):
        """Let a model take a step down the gradient of a loss."""
        self.zero_grad()
        loss.backward()
        optimizer.apply([one.grad for one in model.trainable_weights], model.trainable_weights)


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

    generator = dp.Sequential([dp.layers.Dense(32, "tanh", input_shape=(LATENT,)), dp.layers.Dense(2)])
    judging = [dp.layers.Dense(32, "tanh", input_shape=(2,)), dp.layers.Dense(32, "tanh"), dp.layers.Dense(1)]
    gan = Gan(dp.Sequential(judging), generator)
    gan.compile(dp.optimizers.Adam(2e-3, beta_1=0.5), dp.optimizers.Adam(1e-3, beta_1=0.5), **options)
    history = gan.fit(x, batch_size=50, epochs=arguments.epochs, verbose=0)

    made = generator.predict(np.random.default_rng(1).standard_normal((2000, LATENT)), verbose=0)
    if dp.rank() == 0:
        for epoch in range(0, arguments.epochs, max(arguments.epochs // 4, 1)):
            print(f"epoch {epoch + 1}:", *(f"{name} {values[epoch]:.3f}" for name, values in history.history.items()))
        print("mean of data", x.mean(0).round(2), "of made samples", made.mean(0, np.float64).round(2))
        print("deviation of data", x.std(0).round(2), "of made samples", made.std(0, np.float64).round(2))


if __name__ == "__main__":
    main()
