"""Keras' `keras.ops.nn`: activations, losses, convolutions and other parts of networks."""

from typing import TYPE_CHECKING

from dptrain.ops.elementwise import (
    elu,
    leaky_relu,
    relu,
    silu,
    softplus,
)
from dptrain.ops.indexing import (
    multi_hot,
    one_hot,
)
from dptrain.ops.linalg.norms import (
    normalize,
)
from dptrain.ops.nn.activation import (
    celu,
    gelu,
    glu,
    hard_shrink,
    hard_sigmoid,
    hard_silu,
    hard_swish,
    hard_tanh,
    log_sigmoid,
    relu6,
    selu,
    sigmoid,
    soft_shrink,
    softmax,
    softsign,
    sparse_plus,
    sparse_sigmoid,
    sparsemax,
    squareplus,
    swish,
    tanh_shrink,
    threshold,
)
from dptrain.ops.nn.attention import (
    dot_product_attention,
)
from dptrain.ops.nn.cross_entropy import (
    binary_crossentropy,
    categorical_crossentropy,
    sparse_categorical_crossentropy,
)
from dptrain.ops.nn.ctc import (
    ctc_decode,
    ctc_loss,
)
from dptrain.ops.nn.normalization import batch_normalization, layer_normalization, moments, rms_normalization
from dptrain.ops.nn.spatial import (
    average_pool,
    conv,
    conv_transpose,
    depthwise_conv,
    max_pool,
    separable_conv,
)
from dptrain.ops.nn.windows import (
    adaptive_average_pool,
    adaptive_max_pool,
    depth_to_space,
    fold,
    psnr,
    space_to_depth,
    unfold,
)
from dptrain.ops.reduction import (
    log_softmax,
)
from dptrain.registry.names import not_there

__all__ = [
    "adaptive_average_pool",
    "adaptive_max_pool",
    "average_pool",
    "batch_normalization",
    "binary_crossentropy",
    "categorical_crossentropy",
    "celu",
    "conv",
    "conv_transpose",
    "ctc_decode",
    "ctc_loss",
    "depth_to_space",
    "depthwise_conv",
    "dot_product_attention",
    "elu",
    "fold",
    "gelu",
    "glu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_swish",
    "hard_tanh",
    "layer_normalization",
    "leaky_relu",
    "log_sigmoid",
    "log_softmax",
    "max_pool",
    "moments",
    "multi_hot",
    "normalize",
    "one_hot",
    "psnr",
    "relu",
    "relu6",
    "rms_normalization",
    "selu",
    "separable_conv",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softmax",
    "softplus",
    "softsign",
    "space_to_depth",
    "sparse_categorical_crossentropy",
    "sparse_plus",
    "sparse_sigmoid",
    "sparsemax",
    "squareplus",
    "swish",
    "tanh_shrink",
    "threshold",
    "unfold",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("ops.nn", __all__)
