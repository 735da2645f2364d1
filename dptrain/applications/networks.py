"""Shared parts of Keras' networks for images: arguments, heads, and files of weights."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dptrain import layers
from dptrain.errors import ConfigError
from dptrain.layers.node import get_source_inputs
from dptrain.models import Model
from dptrain.ops.operation_calls import is_symbolic
from dptrain.program.dims import read
from dptrain.program.tensor import Tensor
from dptrain.runtime.image_format import image_data_format

SMALLEST = 32
"""Pixels that height and width must have, where a network does not ask for more."""

# A network between input and head, and the head: (x, classes, activation) -> outputs.
Body = Callable[[Tensor], Tensor]
Top = Callable[[Tensor, int, Any], Tensor]

_ABOUT = """{name}, like `keras.applications.{name}`: the same layers, names, shapes and order of weights.

Args:
    include_top: add the classifier, which needs a static `input_shape`.
    weights: None for random ones, or the path of a file of Keras' or dptrain's for this network: `.weights.h5`,
        `.keras`, `.safetensors`, or `.h5` as Keras fetches it. "imagenet" is refused: nothing is fetched.
    input_tensor: an `Input`, or a tensor computed from one, to begin with.
    input_shape: (height, width, channels), at least {smallest} x {smallest}; by default ({size}, {size}, 3), and any
        size without the classifier.
    pooling: without the classifier, None for the last feature maps, "avg" or "max" for a number per channel.
    classes: outputs of the classifier.
    classifier_activation: of the classifier; None for logits.
    name: of the model.

Returns:
    A functional model.

Raises:
    ConfigError: an argument is out of range.
    DataError: the file is missing or damaged, or has the weights of another network.

Source: {source}
"""


@dataclass(frozen=True, eq=False)
class NetworkArguments:
    """The arguments that all of Keras' networks share; see `network`."""

    include_top: bool
    weights: str | Path | None
    input_tensor: Tensor | None
    input_shape: Sequence[int | None] | None
    pooling: str | None
    classes: int
    classifier_activation: Any
    name: str | None

    def shape(self, size: int = 224, smallest: int = SMALLEST, *, any_size: bool = False) -> tuple[int | None, ...]:
        """Return (height, width, channels) of a sample, None for lengths that batches may choose."""
        if not self.input_shape:
            return (size, size, 3) if self.include_top else (None, None, 3)
        shape = tuple(self.input_shape)
        if len(shape) != 3:
            raise ConfigError("`input_shape` must be a tuple of three integers.")
        if any(length is not None and length < smallest for length in shape[:2]):
            raise ConfigError(f"Input size must be at least {smallest}x{smallest}; Received: input_shape={shape}")
        if self.include_top and None in shape and not any_size:
            raise ConfigError(
                f"If `include_top` is True, you should specify a static `input_shape`. Received: input_shape={shape}"
            )
        return shape

    def with_name(self, name: str) -> "NetworkArguments":
        """Return a copy with a name."""
        return replace(self, name=name)

    def check(self) -> None:
        """Refuse weights that would be fetched, unknown pooling, and activations that weights do not allow."""
        if self.weights == "imagenet":
            raise ConfigError(
                "weights='imagenet': dptrain downloads nothing; pass weights=FILE, such as one from ~/.keras/models "
                "or written by Keras' save_weights, or weights=None for random weights"
            )
        if image_data_format() != "channels_last":
            raise ConfigError(
                f"not supported: applications with image_data_format={image_data_format()!r}; set 'channels_last'"
            )
        if self.pooling not in (None, "avg", "max"):
            raise ConfigError(f"pooling = {self.pooling!r}: expected None, 'avg' or 'max'")
        if self.weights is not None and self.include_top and self.classifier_activation not in (None, "softmax"):
            raise ConfigError(
                "Only `None` and `softmax` activations are allowed for the `classifier_activation` argument when using "
                "pretrained weights, with `include_top=True`; Received: "
                f"classifier_activation={self.classifier_activation}"
            )


def assemble(
    options: NetworkArguments,
    body: Body,
    top: Top,
    *,
    size: int = 224,
    smallest: int = SMALLEST,
    named_pooling: bool = False,
    any_size: bool = False,
    headless: Callable[[Tensor], Tensor] | None = None,
) -> Model:
    """Build the model from a network's arguments.

    `body` maps the input to the last feature maps, `top` adds the classifier, and without it `headless` follows the
    pooling. `size` is the usual height and width, `smallest` the least; `any_size` classifiers take any.
    `named_pooling` names the pooling layer "avg_pool" or "max_pool".
    """
    options.check()
    shape = options.shape(size, smallest, any_size=any_size)
    start = options.input_tensor
    if start is None:
        start = layers.Input(shape)
    elif not is_symbolic(start):
        raise ConfigError(
            f"input_tensor: expected an `Input`, or a tensor computed from one, found {type(start).__name__}"
        )
    inputs = start if options.input_tensor is None else get_source_inputs(start)
    outputs = body(start)
    if options.include_top:
        outputs = top(outputs, options.classes, options.classifier_activation)
    else:
        if options.pooling is not None:
            kind = layers.GlobalAveragePooling2D if options.pooling == "avg" else layers.GlobalMaxPooling2D
            outputs = kind(name=f"{options.pooling}_pool" if named_pooling else None)(outputs)
        outputs = outputs if headless is None else headless(outputs)
    model = Model(inputs, outputs, name=options.name)
    if options.weights is not None:
        model.load_weights(options.weights)
    return model


def network(
    label: str,
    body: Body,
    top: Top,
    *,
    source: str,
    size: int = 224,
    smallest: int = SMALLEST,
    named_pooling: bool = False,
    model_name: str | None = None,
) -> Any:
    """Return the function that builds a network, with Keras' arguments and defaults; see `assemble`."""

    def make(
        include_top: bool = True,
        weights: str | Path | None = "imagenet",
        input_tensor: Tensor | None = None,
        input_shape: Sequence[int | None] | None = None,
        pooling: str | None = None,
        classes: int = 1000,
        classifier_activation: Any = "softmax",
        name: str = model_name or label.lower(),
    ) -> Model:
        options = NetworkArguments(
            include_top, weights, input_tensor, input_shape, pooling, classes, classifier_activation, name
        )
        return assemble(options, body, top, size=size, smallest=smallest, named_pooling=named_pooling)

    make.__name__ = make.__qualname__ = label
    make.__doc__ = _ABOUT.format(name=label, size=size, smallest=smallest, source=source)
    return make


def classified(x: Tensor, classes: int, activation: Any) -> Tensor:
    """Return the usual classifier of feature maps: mean of each channel, and a dense layer."""
    pooled = layers.GlobalAveragePooling2D(name="avg_pool")
    return chain(x, pooled, layers.Dense(classes, activation=activation, name="predictions"))


def chain(x: Tensor, *through: layers.Layer) -> Tensor:
    """Apply layers to x, one after the other."""
    for layer in through:
        x = layer(x)
    return x


def padding_before(x: Tensor, kernel: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return the padding with which stride 2 halves (rows, height, width, channels) like TensorFlow's "same"."""
    half = kernel // 2
    top, left = (half - (1 if length is None else 1 - length % 2) for length in read(x.shape)[1:3])
    return (top, half), (left, half)


def divisible(channels: float, by: int = 8) -> int:
    """Return the nearest multiple of `by`, at least `by` and 90 % of the channels."""
    nearest = max(by, int(channels + by / 2) // by * by)
    return nearest + by if nearest < 0.9 * channels else nearest
