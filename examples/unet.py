"""A U-Net that segments shapes in color pictures.

    python examples/unet.py
    mpirun -n 2 python examples/unet.py

Both print the same numbers. `--depth N` halves pictures N times, `--width N` gives the first convolutions N filters.
Source of the architecture: O. Ronneberger et al., "U-Net: Convolutional networks for biomedical image segmentation",
MICCAI 2015; with BatchNormalization, and padding that keeps the pictures' size.
"""

import argparse

import shapes

import dptrain as keras
from dptrain import layers


def convolved(x, filters):
    """Return what two convolutions make of x, of its height and width."""
    for _ in range(2):
        x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    return x


def make_unet(depth=2, width=8):
    """Return a model from (rows, 32, 32, 3) pictures, 0 to 255, to (rows, 32, 32, 1) probabilities."""
    inputs = keras.Input((shapes.SIDE, shapes.SIDE, 3))
    x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    passed = []
    for level in range(depth):
        x = convolved(x, width * 2**level)
        passed.append(x)
        x = layers.MaxPooling2D()(x)
    x = convolved(x, width * 2**depth)
    for level in reversed(range(depth)):
        x = layers.Conv2DTranspose(width * 2**level, 2, strides=2)(x)
        x = convolved(layers.Concatenate()([passed[level], x]), width * 2**level)
    return keras.Model(inputs, layers.Conv2D(1, 1, activation="sigmoid")(x), name="unet")


def main() -> None:
    """Train, and print what it comes to after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=1000, help="pictures to train on")
    parser.add_argument("--batch-size", type=int, default=25)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--width", type=int, default=8)
    arguments = parser.parse_args()

    (x, y, _), (x_held, y_held, _) = shapes.draw(arguments.samples, seed=1), shapes.draw(arguments.samples // 5, seed=2)
    model = make_unet(arguments.depth, arguments.width)
    model.compile(
        keras.optimizers.Adam(0.003),
        "binary_crossentropy",
        metrics=["accuracy", keras.metrics.BinaryIoU(target_class_ids=[1], name="iou")],
        device=arguments.device,
        dtype=arguments.dtype,
    )
    options = {"batch_size": arguments.batch_size, "epochs": arguments.epochs, "validation_data": (x_held, y_held)}
    history = model.fit(x, y, **options, verbose=0).history
    if keras.rank() == 0:
        for epoch in range(arguments.epochs):
            print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {values[epoch]:.4f}" for name, values in history.items()))


if __name__ == "__main__":
    main()
