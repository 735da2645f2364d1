"""CIFAR-100: small images of 100 classes in 20 groups, A. Krizhevsky, 2009; under Keras' name."""

from typing import TYPE_CHECKING

from dptrain.data.keras_sets import Split, pictures
from dptrain.errors import ConfigError
from dptrain.registry.arguments import checked_arguments
from dptrain.registry.names import not_there

__all__ = ["load_data"]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("datasets.cifar100", __all__)


@checked_arguments
def load_data(label_mode: str = "fine") -> Split:
    """Return `(x_train, y_train), (x_test, y_test)` like `cifar10.load_data`, from cifar-100-binary.tar.gz.

    `label_mode` is "fine" for the 100 classes, "coarse" for their 20 groups.
    """
    if label_mode not in ("fine", "coarse"):
        raise ConfigError(f'`label_mode` must be one of `"fine"`, `"coarse"`. Received: label_mode={label_mode}.')
    return pictures(
        "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz",
        "58a81ae192c23a4be8b1804d68e518ed807d710a4eb253b1f2a199162a40d8ec",
        (["train.bin"], ["test.bin"]),
        labels=2,
        label=("coarse", "fine").index(label_mode),
    )
