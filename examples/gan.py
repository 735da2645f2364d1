"""A DCGAN whose two models are trained alternately in one `train_step`, as in Keras' guide "Customizing what happens in
fit()" (F. Chollet, 2020), with `import dptrain as keras`.

    python examples/gan.py
    mpirun -n 2 python examples/gan.py

Both print the same losses. `--steps N` trains for N batches, `--width N` gives the convolutions N filters (the guide's
have 64 to 128), `--data-dir DIR` uses MNIST from DIR instead of the built-in strokes. Source of the architecture: A.
Radford et al., "Unsupervised representation learning with deep convolutional generative adversarial networks",
ICLR 2016.
"""

import argparse

import numpy as np

import dptrain as keras
from dptrain import layers


def make_discriminator(width):
    """Return a model from (rows, 28, 28, 1) images to one logit each: high for made images."""
    return keras.Sequential(
        [
            keras.Input(shape=(28, 28, 1)),
            layers.Conv2D(width, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(2 * width, (3, 3), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.GlobalMaxPooling2D(),
            layers.Dense(1),
        ],
        name="discriminator",
    )


def make_generator(width, latent_dim):
    """Return a model from (rows, latent_dim) noise to (rows, 28, 28, 1) images in [0, 1]."""
    return keras.Sequential(
        [
            keras.Input(shape=(latent_dim,)),
            layers.Dense(7 * 7 * 2 * width),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Reshape((7, 7, 2 * width)),
            layers.Conv2DTranspose(2 * width, (4, 4), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2DTranspose(2 * width, (4, 4), strides=(2, 2), padding="same"),
            layers.LeakyReLU(negative_slope=0.2),
            layers.Conv2D(1, (7, 7), padding="same", activation="sigmoid"),
        ],
        name="generator",
    )


class GAN(keras.Model):
    """A discriminator and a generator that are trained in turn; the guide's class with ops in place of PyTorch."""

    def __init__(self, discriminator, generator, latent_dim):
        super().__init__()
        self.discriminator = discriminator
        self.generator = generator
        self.latent_dim = latent_dim
        self.d_loss_tracker = keras.metrics.Mean(name="d_loss")
        self.g_loss_tracker = keras.metrics.Mean(name="g_loss")
        self.seed_generator = keras.random.SeedGenerator(1337)
        self.built = True  # because its models are

    @property
    def metrics(self):
        return [self.d_loss_tracker, self.g_loss_tracker]

    def compile(self, d_optimizer, g_optimizer, loss_fn, **options):
        super().compile(**options)
        self.d_optimizer = d_optimizer
        self.g_optimizer = g_optimizer
        self.loss_fn = loss_fn

    def train_step(self, real_images):
        if isinstance(real_images, tuple):
            real_images = real_images[0]
        # Decode random points to fake images, and combine them with real images.
        batch_size = real_images.shape[0]
        random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        generated_images = self.generator(random_latent_vectors)
        combined_images = keras.ops.concatenate([generated_images, real_images], axis=0)

        # Labels of fake and real images, with noise: an important trick. Drawn for each half, so that a row has
        # the same noise on any number of ranks, each of which combines its own rows.
        noise = [keras.random.uniform((batch_size, 1), seed=self.seed_generator) for _ in range(2)]
        labels = keras.ops.concatenate([1 + 0.05 * noise[0], 0.05 * noise[1]], axis=0)

        self.zero_grad()
        predictions = self.discriminator(combined_images)
        d_loss = self.loss_fn(labels, predictions)
        d_loss.backward()
        grads = [v.value.grad for v in self.discriminator.trainable_weights]
        self.d_optimizer.apply(grads, self.discriminator.trainable_weights)

        # Train the generator with labels that say "all real images"; the discriminator's weights stay.
        random_latent_vectors = keras.random.normal(shape=(batch_size, self.latent_dim), seed=self.seed_generator)
        misleading_labels = keras.ops.zeros((batch_size, 1))
        self.zero_grad()
        predictions = self.discriminator(self.generator(random_latent_vectors))
        g_loss = self.loss_fn(misleading_labels, predictions)
        g_loss.backward()
        grads = [v.value.grad for v in self.generator.trainable_weights]
        self.g_optimizer.apply(grads, self.generator.trainable_weights)

        self.d_loss_tracker.update_state(d_loss)
        self.g_loss_tracker.update_state(g_loss)
        return {"d_loss": self.d_loss_tracker.result(), "g_loss": self.g_loss_tracker.result()}


def make_gan(width=8, latent_dim=16, **options):
    """Return both models in one, compiled as in the guide; options go to `compile`."""
    gan = GAN(make_discriminator(width), make_generator(width, latent_dim), latent_dim)
    gan.compile(
        d_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        g_optimizer=keras.optimizers.Adam(learning_rate=0.0003),
        loss_fn=keras.losses.BinaryCrossentropy(from_logits=True),
        **options,
    )
    return gan


def main() -> None:
    """Train, and print the losses and how bright images are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", metavar="DIR", help="of MNIST's four files")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=40, help="batches of an epoch")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=8)
    arguments = parser.parse_args()

    if arguments.data_dir is None:
        (images, _), _ = keras.datasets.load("strokes")
    else:
        (images, _), _ = keras.datasets.mnist.load_data(arguments.data_dir)
    images = images[: arguments.steps * arguments.batch_size]
    images = np.reshape(images, (-1, 28, 28, 1)).astype("float32") / 255

    gan = make_gan(arguments.width, device=arguments.device, dtype=arguments.dtype)
    history = gan.fit(images, batch_size=arguments.batch_size, epochs=arguments.epochs, verbose=0).history
    noise = np.random.default_rng(1).standard_normal((100, gan.latent_dim))
    made = gan.generator.predict(noise, verbose=0)
    if keras.rank() == 0:
        for epoch, (d_loss, g_loss) in enumerate(zip(history["d_loss"], history["g_loss"], strict=True), 1):
            print(f"epoch {epoch}: d_loss {d_loss:.4f} g_loss {g_loss:.4f}")
        print(f"mean of images {images.mean():.2f}, of made images {made.mean():.2f}")


if __name__ == "__main__":
    main()
