"""A residual network for small pictures, trained on generated shapes or a folder of pictures.

    python examples/resnet.py
    mpirun -n 2 python examples/resnet.py

Both print the same numbers. `--pictures DIR` uses a folder with one folder of pictures per class; each rank decodes its
own rows; `--depth N` gives each of the three stages N blocks, `--width N` the first N filters. Source of the
architecture: K. He et al., "Deep residual learning for image recognition", CVPR 2016, section 4.2.
"""

import argparse

import shapes

import dptrain as keras
from dptrain import layers


def block(x, filters, stride):
    """Return two convolutions' outputs, added to x, or to a projection of it where it has another shape."""
    shortcut = x
    if stride != 1 or x.shape[-1] != filters:
        shortcut = layers.BatchNormalization(momentum=0.9)(layers.Conv2D(filters, 1, strides=stride, use_bias=False)(x))
    x = layers.Conv2D(filters, 3, strides=stride, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.ReLU()(layers.Add()([x, shortcut]))


def make_resnet(classes, depth=1, width=16):
    """Return a model from (rows, 32, 32, 3) pictures, 0 to 255, to (rows, classes) probabilities."""
    inputs = keras.Input((shapes.SIDE, shapes.SIDE, 3))
    x = layers.Rescaling(1 / 127.5, offset=-1)(inputs)
    x = layers.RandomFlip()(x)
    x = layers.Conv2D(width, 3, padding="same", use_bias=False)(x)
    x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
    for stage in range(3):
        for number in range(depth):
            x = block(x, width * 2**stage, 2 if stage and number == 0 else 1)
    outputs = layers.Dense(classes, activation="softmax")(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, outputs, name="resnet")


def main() -> None:
    """Train, and print what it comes to after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pictures", metavar="DIR", help="a folder with one folder of pictures per class")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda")
    parser.add_argument("--dtype", default="float32", help="float32, or float64 on the CPU")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--samples", type=int, default=2000, help="shapes to train on")
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--depth", type=int, default=1)
    parser.add_argument("--width", type=int, default=8)
    arguments = parser.parse_args()

    if arguments.pictures is None:
        names = shapes.NAMES
        (x, _, y), (x_held, _, y_held) = (
            shapes.draw(arguments.samples, seed=1),
            shapes.draw(arguments.samples // 5, seed=2),
        )
        data = {"x": x, "y": y, "validation_data": (x_held, y_held), "batch_size": arguments.batch_size}
    else:
        train, held = keras.utils.image_dataset_from_directory(
            arguments.pictures,
            image_size=(shapes.SIDE, shapes.SIDE),
            batch_size=arguments.batch_size,
            validation_split=0.2,
            subset="both",
            seed=1,
            verbose=False,
        )
        names, data = train.class_names, {"x": train, "validation_data": held}
    model = make_resnet(len(names), arguments.depth, arguments.width)
    model.compile(
        keras.optimizers.Adam(0.003),
        "sparse_categorical_crossentropy",
        metrics=["accuracy"],
        device=arguments.device,
        dtype=arguments.dtype,
    )
    history = model.fit(**data, epochs=arguments.epochs, verbose=0).history
    if keras.rank() == 0:
        for epoch in range(arguments.epochs):
            print(f"epoch {epoch + 1}: " + ", ".join(f"{name} {values[epoch]:.4f}" for name, values in history.items()))


if __name__ == "__main__":
    main()
