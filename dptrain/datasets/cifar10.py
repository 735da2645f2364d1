"""CIFAR-10: small images of 10 classes, A. Krizhevsky, 2009; under Keras' name."""

from typing import TYPE_CHECKING

from dptrain.data.keras_sets import Split, pictures
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.cifar10", __all__)


@checked_arguments
def load_data() -> Split:
    """Return `(x_train, y_train), (x_test, y_test)`: images (50000, 32, 32, 3), ..., labels (rows, 1), all uint8.

    The file is the binary version, cifar-10-binary.tar.gz, whose images and order are those that Keras reads; see
    `datasets` for where it lies and for errors.
    """
    return pictures(
        "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
        "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
        ([f"data_batch_{number}.bin" for number in range(1, 6)], ["test_batch.bin"]),
        labels=1,
        label=0,
    )
