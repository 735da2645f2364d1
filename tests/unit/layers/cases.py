"""What every layer is tried with: the generic tests run over `LAYERS`, and a new layer without cases fails them."""

from collections.abc import Callable
from typing import Any

import numpy as np

import dptrain as dp
from dptrain import layers as L  # noqa: N812
from dptrain.layers import Layer

ROWS = 5


class Case:
    """A layer, the shapes of its inputs without the rows, and the shape of its output.

    Args:
        make: returns the layer.
        shapes: one, or a list of the inputs of a layer that takes a list.
        output: of a sample.
        integers: the inputs are integers below this.
        moves: a call in training depends on what those before have left, and its gradient leaves that out.
        apart: the inputs are arguments of their own, and not a list.
        keywords: further arguments of the call.
    """

    def __init__(
        self,
        make: Callable[[], Layer],
        shapes: Any,
        output: tuple[int, ...],
        integers: int = 0,
        moves: bool = False,
        apart: bool = False,
        **keywords: Any,
    ) -> None:
        self.make, self.shapes, self.output, self.integers, self.moves = make, shapes, output, integers, moves
        self.apart, self.keywords = apart, keywords

    def inputs(self, rows: int = ROWS) -> list[np.ndarray]:
        """Return the inputs, always as a list."""
        rng = np.random.default_rng(11)
        shapes = self.shapes if isinstance(self.shapes, list) else [self.shapes]
        if self.integers:
            return [rng.integers(0, self.integers, (rows, *shape)) for shape in shapes]
        return [rng.normal(size=(rows, *shape)) for shape in shapes]

    def call(self, layer: Layer, inputs: list[Any], training: bool | None = None) -> Any:
        """Call a layer of this case."""
        arguments = inputs if self.apart or not isinstance(self.shapes, list) else [list(inputs)]
        return layer(*arguments, training=training, **self.keywords)


class CellCase(Case):
    """A cell, called with its inputs and then its states: its output."""

    def call(self, layer: Layer, inputs: list[Any], training: bool | None = None) -> Any:
        """Call a cell of this case."""
        return layer(inputs[0], list(inputs[1:]), training=training)[0]


def recurrent(name: str) -> list[Case]:
    """Return cases of a recurrent layer that has `Dense`' arguments."""
    make = getattr(L, name)
    return [
        Case(lambda: make(2), (4, 3), (2,)),
        Case(lambda: make(3, return_sequences=True, go_backwards=True, activation="relu"), (4, 2), (4, 3)),
        Case(lambda: make(2, use_bias=False, unroll=True, kernel_regularizer="l2", dropout=0.5, seed=3), (3, 2), (2,)),
        Case(lambda: make(2, recurrent_dropout=0.4, bias_initializer="ones", bias_constraint="non_neg"), (3, 2), (2,)),
    ]


def convolutional(name: str, size: tuple[int, ...], valid: tuple[int, ...]) -> list[Case]:
    """Return cases of a recurrent layer of convolutions over some size, and what is left of it by windows of 2."""
    make = getattr(L, name)
    return [
        Case(lambda: make(2, 2), (3, *size, 1), (*valid, 2)),
        Case(
            lambda: make(
                1, 2, padding="same", data_format="channels_first", return_sequences=True, unit_forget_bias=False
            ),
            *((2, 2, *size), (2, 1, *size)),
        ),
    ]


@dp.saving.register_keras_serializable("cases")
def shifted(x: Any, by: float = 1.0, training: bool = False) -> Any:
    """Return what a `Lambda` computes."""
    return x * x + by


PAIR = [(3, 2), (3, 2)]
CASES: dict[str, list[Case]] = {
    "Activation": [Case(lambda: L.Activation("swish"), (3,), (3,)), Case(lambda: L.Activation("softmax"), (3,), (3,))],
    "ActivityRegularization": [Case(lambda: L.ActivityRegularization(0.1, 0.2), (3,), (3,))],
    "Add": [Case(L.Add, PAIR, (3, 2)), Case(L.Add, [(3, 2), (1, 2), (3, 1)], (3, 2))],
    **{
        f"Adaptive{kind}Pooling{rank}D": [
            Case(
                lambda pooling_layer=pooling, rank=rank: pooling_layer((3, 2, 1)[:rank]),
                (*(5, 4, 2)[:rank], 2),
                (*(3, 2, 1)[:rank], 2),
            ),
            Case(
                lambda pooling_layer=pooling: pooling_layer(2, "channels_first"),
                (2, *(3, 4, 5)[:rank]),
                (2,) * (rank + 1),
            ),
        ]
        for kind in ("Average", "Max")
        for rank in (1, 2, 3)
        for pooling in (getattr(L, f"Adaptive{kind}Pooling{rank}D"),)
    },
    "AdditiveAttention": [
        Case(L.AdditiveAttention, [(3, 4), (2, 4)], (3, 4)),
        Case(lambda: L.AdditiveAttention(False, 0.25, seed=3), [(3, 4), (2, 5), (2, 4)], (3, 5)),
    ],
    "AlphaDropout": [Case(lambda: L.AlphaDropout(0.25, (None, 1, None), seed=3), (3, 4), (3, 4))],
    "Attention": [
        Case(L.Attention, [(3, 4), (2, 4)], (3, 4)),
        Case(lambda: L.Attention(True, dropout=0.25, seed=3), [(3, 4), (5, 2), (5, 4)], (3, 2), use_causal_mask=True),
        Case(lambda: L.Attention(True, "concat"), [(3, 4), (2, 4)], (3, 4)),
    ],
    "AugMix": [
        Case(lambda: L.AugMix((-5, 5), 2, 1, 0.4, seed=3), (3, 4, 3), (3, 4, 3)),
    ],
    "AutoContrast": [
        Case(lambda: L.AutoContrast((-2, 3)), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.AutoContrast(data_format="channels_first"), (2, 3, 4), (2, 3, 4)),
    ],
    "Average": [Case(L.Average, [(3,), (3,), (3,)], (3,))],
    "AveragePooling1D": [
        Case(L.AveragePooling1D, (5, 2), (2, 2)),
        Case(lambda: L.AveragePooling1D(3, 2, data_format="channels_first"), (2, 7), (2, 3)),
    ],
    "AveragePooling2D": [
        Case(L.AveragePooling2D, (4, 5, 2), (2, 2, 2)),
        Case(lambda: L.AveragePooling2D((3, 2), strides=(2, 1), padding="same"), (4, 5, 2), (2, 5, 2)),
        Case(lambda: L.AveragePooling2D(2, 1, data_format="channels_first"), (2, 3, 3), (2, 2, 2)),
    ],
    "AveragePooling3D": [Case(lambda: L.AveragePooling3D((2, 1, 2), 1), (3, 2, 3, 2), (2, 2, 2, 2))],
    "BatchNormalization": [
        Case(lambda: L.BatchNormalization(momentum=0.5, gamma_regularizer="l1", beta_initializer="ones"), (4,), (4,)),
        Case(lambda: L.BatchNormalization(center=False, scale=False), (3, 2, 4), (3, 2, 4)),
        Case(lambda: L.BatchNormalization(trainable=False, name="frozen"), (4,), (4,)),
        Case(lambda: L.BatchNormalization(1, 0.5), (4, 2, 3), (4, 2, 3)),
        Case(lambda: L.BatchNormalization(renorm=True, renorm_momentum=0.5), (4,), (4,), moves=True),
        Case(
            lambda: L.BatchNormalization(
                1, renorm=True, renorm_clipping={"rmin": 0.9, "rmax": 1.1, "dmax": 0.1}, scale=False
            ),
            *((3, 2), (3, 2)),
            moves=True,
        ),
    ],
    "CategoryEncoding": [
        Case(lambda: L.CategoryEncoding(5), (3,), (5,), integers=5),
        Case(lambda: L.CategoryEncoding(4, "count"), (3,), (4,), integers=4),
        Case(lambda: L.CategoryEncoding(4, "one_hot"), (3,), (3, 4), integers=4),
    ],
    "CenterCrop": [
        Case(lambda: L.CenterCrop(2, 3), (4, 4, 2), (2, 3, 2)),
        Case(lambda: L.CenterCrop(3, 2, "channels_first"), (2, 2, 5), (2, 3, 2)),
    ],
    "Concatenate": [Case(L.Concatenate, [(3, 2), (3, 4)], (3, 6)), Case(lambda: L.Concatenate(1), PAIR, (6, 2))],
    "ContrastLimitedAdaptiveHistogramEqualization": [
        Case(lambda: L.ContrastLimitedAdaptiveHistogramEqualization((-3, 3), 32.0, (2, 2)), (4, 8, 2), (4, 8, 2)),
        Case(
            lambda: L.ContrastLimitedAdaptiveHistogramEqualization((-3, 3), 0, (1, 3), "channels_first"),
            (1, 2, 4),
            (1, 2, 4),
        ),
    ],
    "Conv1D": [
        Case(lambda: L.Conv1D(3, 2, 2, activation="tanh", bias_initializer="ones"), (5, 2), (2, 3)),
        Case(lambda: L.Conv1D(4, 3, padding="causal", dilation_rate=2, groups=2), (5, 4), (5, 4)),
        Case(lambda: L.Conv1D(4, 3, padding="same", data_format="channels_first", groups=2), (2, 5), (4, 5)),
    ],
    "Conv1DTranspose": [
        Case(lambda: L.Conv1DTranspose(2, 3, 2, output_padding=1), (3, 2), (8, 2)),
        Case(lambda: L.Conv1DTranspose(2, 3, dilation_rate=2, padding="same"), (4, 2), (4, 2)),
        Case(lambda: L.Conv1DTranspose(3, 3, 2, "same", data_format="channels_first"), (2, 4), (3, 8)),
    ],
    "Conv2D": [
        Case(lambda: L.Conv2D(3, 2), (4, 5, 2), (3, 4, 3)),
        Case(
            lambda: L.Conv2D(2, (3, 2), (2, 1), "same", activation="tanh", bias_initializer="ones"),
            (4, 5, 2),
            (2, 5, 2),
        ),
        Case(lambda: L.Conv2D(2, 2, dilation_rate=2, use_bias=False, kernel_regularizer="l2"), (4, 5, 1), (2, 3, 2)),
        Case(lambda: L.Conv2D(4, 2, 2, "same", "channels_first", groups=2, activation="softmax"), (4, 3, 4), (4, 2, 2)),
        Case(
            lambda: L.Conv2D(4, 2, groups=2, kernel_regularizer="l2", lora_rank=2, lora_alpha=3), (3, 3, 4), (2, 2, 4)
        ),
        Case(lambda: L.Conv2D(4, (1, 2), groups=2, bias_initializer="ones"), (2, 3, 2), (2, 2, 4)),
    ],
    "Conv2DTranspose": [
        Case(lambda: L.Conv2DTranspose(2, 3, 2), (3, 2, 2), (7, 5, 2)),
        Case(lambda: L.Conv2DTranspose(3, 3, 2, "same", activation="sigmoid"), (3, 2, 2), (6, 4, 3)),
        Case(lambda: L.Conv2DTranspose(2, 3, 3, "same", output_padding=(0, 2)), (2, 2, 2), (4, 6, 2)),
        Case(lambda: L.Conv2DTranspose(2, 2, dilation_rate=2, data_format="channels_first"), (2, 2, 3), (2, 4, 5)),
    ],
    "Conv3D": [
        Case(lambda: L.Conv3D(2, (2, 1, 2), padding="same", activation="softmax"), (2, 2, 3, 2), (2, 2, 3, 2)),
        Case(lambda: L.Conv3D(2, 2, (2, 1, 1), data_format="channels_first"), (2, 3, 2, 3), (2, 1, 1, 2)),
    ],
    "Conv3DTranspose": [
        Case(lambda: L.Conv3DTranspose(2, (2, 1, 3), (2, 1, 2), "same"), (2, 1, 2, 2), (4, 1, 4, 2)),
        Case(lambda: L.Conv3DTranspose(1, 2, data_format="channels_first"), (2, 2, 1, 2), (1, 3, 2, 3)),
        Case(lambda: L.Conv3DTranspose(1, 2, 2, output_padding=(1, 0, 1)), (2, 1, 1, 2), (5, 2, 3, 1)),
    ],
    "Cropping1D": [Case(lambda: L.Cropping1D((1, 2)), (5, 2), (2, 2)), Case(lambda: L.Cropping1D(0), (2, 2), (2, 2))],
    "Cropping2D": [
        Case(lambda: L.Cropping2D(((1, 0), (0, 2))), (3, 4, 2), (2, 2, 2)),
        Case(lambda: L.Cropping2D(1, data_format="channels_first"), (2, 4, 3), (2, 2, 1)),
    ],
    "Cropping3D": [
        Case(L.Cropping3D, (3, 3, 4, 1), (1, 1, 2, 1)),
        Case(lambda: L.Cropping3D((0, 1, (1, 0)), data_format="channels_first"), (1, 1, 3, 2), (1, 1, 1, 1)),
    ],
    "CutMix": [
        Case(lambda: L.CutMix(seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.CutMix((0.5, 1), 3, "channels_first"), (2, 3, 4), (2, 3, 4)),
    ],
    "Dense": [
        Case(
            lambda: L.Dense(3, dp.activations.elu, False, dp.initializers.HeNormal(seed=4), "ones", "l2", name="a"),
            (4,),
            (3,),
        ),
        Case(lambda: L.Dense(2, "gelu", bias_initializer="ones", activity_regularizer="l2"), (3, 4), (3, 2)),
        Case(lambda: L.Dense(3, "tanh", kernel_regularizer="l2", lora_rank=2, lora_alpha=3), (3, 4), (3, 3)),
    ],
    "DepthwiseConv1D": [
        Case(lambda: L.DepthwiseConv1D(3, 2, "same", depth_multiplier=2, depthwise_regularizer="l2"), (5, 2), (3, 4)),
        Case(lambda: L.DepthwiseConv1D(2, dilation_rate=2, data_format="channels_first"), (2, 5), (2, 3)),
    ],
    "DepthwiseConv2D": [
        Case(
            lambda: L.DepthwiseConv2D((2, 3), padding="same", activation="relu", use_bias=False), (3, 4, 2), (3, 4, 2)
        ),
        Case(lambda: L.DepthwiseConv2D(2, 2, depth_multiplier=2, data_format="channels_first"), (2, 4, 4), (4, 2, 2)),
    ],
    "Discretization": [
        Case(lambda: L.Discretization([-1.0, 0.1, 0.5], output_mode="one_hot"), (3,), (3, 4)),
        Case(lambda: L.Discretization([0.0, 1.5], output_mode="count"), (4,), (3,)),
    ],
    "Dot": [
        Case(lambda: L.Dot(1), [(4,), (4,)], (1,)),
        Case(lambda: L.Dot((2, 1), normalize=True), [(3, 4), (4, 2)], (3, 2)),
    ],
    "Dropout": [
        *(Case(lambda: L.Dropout(0.25, seed=3), (3, 4), (3, 4)), Case(lambda: L.Dropout(1.0), (3,), (3,))),
        Case(lambda: L.Dropout(0.5, (None, 1, 4), 3), (3, 4), (3, 4)),
        Case(lambda: L.Dropout(0.5, [1, None, 1], 3), (3, 4), (3, 4)),
    ],
    "ELU": [Case(lambda: L.ELU(0.5), (3,), (3,))],
    "EinsumDense": [
        Case(
            lambda: L.EinsumDense("abc,cde->abde", (None, 3, 2), "tanh", "e", bias_initializer="ones"),
            (2, 4),
            (2, 3, 2),
        ),
        Case(lambda: L.EinsumDense("...x,xy->...y", 3, bias_axes="y", kernel_regularizer="l2"), (2, 4), (2, 3)),
        Case(lambda: L.EinsumDense("ab...,bc->ac...", 3, bias_axes="c"), (2, 4), (3, 4)),
        Case(lambda: L.EinsumDense("ab,bc->ac", 3), (4,), (3,)),
        Case(lambda: L.EinsumDense("abc,cde->abde", (None, 3, 2), bias_axes="e", lora_rank=2), (2, 4), (2, 3, 2)),
        Case(lambda: L.EinsumDense("ab...,bc->ac...", 3, lora_rank=2, lora_alpha=1), (2, 4), (3, 4)),
    ],
    "Embedding": [
        Case(lambda: L.Embedding(7, 3, embeddings_regularizer="l2"), (4,), (4, 3), integers=7),
        Case(
            lambda: L.Embedding(7, 3, embeddings_regularizer="l2", lora_rank=2, lora_alpha=4), (4,), (4, 3), integers=7
        ),
    ],
    "Equalization": [
        Case(lambda: L.Equalization((-2, 3), 8), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.Equalization((-3, 3), 4, "channels_first"), (2, 3, 4), (2, 3, 4)),
    ],
    "Flatten": [
        *(Case(L.Flatten, (2, 3, 2), (12,)), Case(L.Flatten, (4,), (4,))),
        Case(lambda: L.Flatten("channels_first"), (2, 3, 2), (12,)),
    ],
    "GaussianDropout": [Case(lambda: L.GaussianDropout(0.25, seed=3), (3, 4), (3, 4))],
    "GaussianNoise": [Case(lambda: L.GaussianNoise(0.5, seed=3), (3, 4), (3, 4))],
    "GlobalAveragePooling1D": [
        Case(L.GlobalAveragePooling1D, (3, 2), (2,)),
        Case(lambda: L.GlobalAveragePooling1D("channels_first", True), (2, 3), (2, 1)),
    ],
    "GlobalAveragePooling2D": [
        Case(L.GlobalAveragePooling2D, (3, 4, 2), (2,)),
        Case(lambda: L.GlobalAveragePooling2D("channels_first", True), (2, 3, 4), (2, 1, 1)),
    ],
    "GlobalAveragePooling3D": [Case(lambda: L.GlobalAveragePooling3D("channels_first"), (2, 3, 1, 2), (2,))],
    "GlobalMaxPooling1D": [Case(L.GlobalMaxPooling1D, (3, 2), (2,))],
    "GlobalMaxPooling2D": [Case(lambda: L.GlobalMaxPooling2D(keepdims=True), (3, 4, 2), (1, 1, 2))],
    "GlobalMaxPooling3D": [Case(lambda: L.GlobalMaxPooling3D("channels_first", True), (2, 3, 1, 2), (2, 1, 1, 1))],
    "GroupNormalization": [
        Case(lambda: L.GroupNormalization(2, beta_initializer="ones", gamma_regularizer="l2"), (3, 4), (3, 4)),
        Case(lambda: L.GroupNormalization(-1, 1, center=False, gamma_initializer="he_normal"), (3, 2, 2), (3, 2, 2)),
        Case(lambda: L.GroupNormalization(3, -2, 0.1, scale=False), (2, 6, 2), (2, 6, 2)),
    ],
    "GroupQueryAttention": [
        Case(lambda: L.GroupQueryAttention(2, 4, 2), [(3, 4), (2, 4)], (3, 4), apart=True),
        Case(
            lambda: L.GroupQueryAttention(3, 2, 1, 0.25, False, 2, use_gate=True, kernel_regularizer="l2", seed=3),
            *([(3, 4), (3, 4), (3, 4)], (3, 4)),
            apart=True,
        ),
    ],
    "Identity": [Case(L.Identity, (3,), (3,))],
    "InputLayer": [Case(lambda: L.InputLayer((3, 4), batch_size=32, name="in"), (3, 4), (3, 4))],
    "Lambda": [
        Case(lambda: L.Lambda(shifted, arguments={"by": 0.5}), (3,), (3,)),
        Case(lambda: L.Lambda("softplus", output_shape=(3, 2)), (3, 2), (3, 2)),
    ],
    "IntegerLookup": [
        Case(lambda: L.IntegerLookup(None, 2, vocabulary=[4, 1, 7], output_mode="count"), (3,), (5,), integers=9),
        Case(
            lambda: L.IntegerLookup(6, mask_token=0, vocabulary=[4, 1], output_mode="one_hot", pad_to_max_tokens=True),
            *((1,), (6,)),
            integers=9,
        ),
        Case(
            lambda: L.IntegerLookup(
                num_oov_indices=0, vocabulary=[2, 0, 1], output_mode="tf_idf", idf_weights=[0.5, 1, 2]
            ),
            *((4,), (3,)),
            integers=3,
        ),
    ],
    "LayerNormalization": [
        Case(lambda: L.LayerNormalization(beta_initializer="ones"), (3, 4), (3, 4)),
        Case(lambda: L.LayerNormalization([1, 2], scale=False), (3, 4), (3, 4)),
        Case(lambda: L.LayerNormalization(1), (3, 4), (3, 4)),
        Case(lambda: L.LayerNormalization([1, 3], beta_initializer="ones"), (3, 2, 4), (3, 2, 4)),
        Case(lambda: L.LayerNormalization(rms_scaling=True), (3, 4), (3, 4)),
    ],
    "LeakyReLU": [Case(lambda: L.LeakyReLU(0.1), (3,), (3,))],
    "MaxPooling1D": [
        Case(L.MaxPooling1D, (5, 2), (2, 2)),
        Case(lambda: L.MaxPooling1D(3, 1, "same", "channels_first"), (2, 5), (2, 5)),
    ],
    "MaxPooling2D": [
        Case(L.MaxPooling2D, (4, 5, 2), (2, 2, 2)),
        Case(lambda: L.MaxPooling2D(3, 1, "same"), (4, 5, 2), (4, 5, 2)),
        Case(lambda: L.MaxPooling2D(2, data_format="channels_first"), (1, 4, 5), (1, 2, 2)),
    ],
    "MaxPooling3D": [
        Case(lambda: L.MaxPooling3D((2, 1, 2), padding="same"), (3, 2, 3, 2), (2, 2, 2, 2)),
        Case(lambda: L.MaxPooling3D(2, 1, data_format="channels_first"), (1, 3, 2, 2), (1, 2, 1, 1)),
    ],
    "Masking": [Case(L.Masking, (3, 2), (3, 2)), Case(lambda: L.Masking(0.5), (4,), (4,))],
    "Maximum": [Case(L.Maximum, PAIR, (3, 2))],
    "Minimum": [Case(L.Minimum, PAIR, (3, 2))],
    "MaxNumBoundingBoxes": [
        Case(lambda: L.MaxNumBoundingBoxes(3, 0, bounding_box_format="xyxy"), (2, 3, 1), (2, 3, 1))
    ],
    "MultiHeadAttention": [
        Case(lambda: L.MultiHeadAttention(2, 3), [(4, 4), (3, 4)], (4, 4), apart=True, use_causal_mask=True),
        Case(
            lambda: L.MultiHeadAttention(2, 3, 2, use_bias=False, output_shape=(2, 3), sliding_window=2, use_gate=True),
            *([(3, 4), (3, 5), (3, 6)], (3, 2, 3)),
            apart=True,
        ),
        Case(
            lambda: L.MultiHeadAttention(2, 3, dropout=0.25, bias_initializer="ones", kernel_regularizer="l2", seed=3),
            *([(3, 4), (2, 4)], (3, 4)),
            apart=True,
            use_causal_mask=True,
        ),
        Case(lambda: L.MultiHeadAttention(2, 3, attention_axes=(1, 2)), [(2, 3, 4), (3, 2, 4)], (2, 3, 4), apart=True),
        Case(lambda: L.MultiHeadAttention(2, 3, attention_axes=-2), [(2, 3, 4), (2, 2, 4)], (2, 3, 4), apart=True),
    ],
    "MixUp": [
        Case(lambda: L.MixUp(seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.MixUp(0.9, "channels_first", 3), (2, 3, 1), (2, 3, 1)),
    ],
    "MelSpectrogram": [
        Case(lambda: L.MelSpectrogram(16, 4, num_mel_bins=5, sampling_rate=800, power_to_db=False), (40,), (5, 11)),
        Case(lambda: L.MelSpectrogram(16, 8, 12, "hamming", 800, 4, mag_exp=1.0, power_to_db=False), (40,), (4, 6)),
    ],
    "Multiply": [Case(L.Multiply, [*PAIR, (3, 2)], (3, 2))],
    "Normalization": [
        Case(L.Normalization, (3, 2), (3, 2)),
        Case(lambda: L.Normalization(1, invert=True), (3, 2), (3, 2)),
        Case(lambda: L.Normalization(mean=[1.0, 2.0], variance=4.0 * np.ones(2)), (3, 2), (3, 2)),
    ],
    "PReLU": [
        Case(lambda: L.PReLU("he_normal", "l2"), (3, 2), (3, 2)),
        Case(lambda: L.PReLU("ones", shared_axes=[1, 2]), (2, 3, 2), (2, 3, 2)),
    ],
    "Permute": [Case(lambda: L.Permute((2, 1)), (3, 4), (4, 3))],
    "Pipeline": [
        Case(
            lambda: L.Pipeline([L.RandomFlip(seed=3, name="flip"), L.Dense(2, name="inner"), L.Flatten(name="flat")]),
            *((3, 4, 2), (24,)),
        ),
    ],
    "RMSNormalization": [
        Case(L.RMSNormalization, (3, 4), (3, 4)),
        Case(lambda: L.RMSNormalization([1, 2], 0.1), (3, 4), (3, 4)),
    ],
    "RandAugment": [
        Case(lambda: L.RandAugment((-5, 5), 2, 0.4, seed=3), (3, 4, 3), (3, 4, 3)),
    ],
    "RandomBrightness": [Case(lambda: L.RandomBrightness(0.1, (-5, 5), seed=3), (3, 3, 2), (3, 3, 2))],
    "RandomColorDegeneration": [
        Case(lambda: L.RandomColorDegeneration(0.5, (-5, 5), seed=3), (3, 4, 3), (3, 4, 3)),
        Case(lambda: L.RandomColorDegeneration((0.2, 0.8), (-5, 5), "channels_first", 3), (3, 2, 2), (3, 2, 2)),
    ],
    "RandomColorJitter": [
        Case(lambda: L.RandomColorJitter((-5, 5), 0.1, 0.2, 0.3, 0.1, 3), (2, 3, 3), (2, 3, 3)),
        Case(
            lambda: L.RandomColorJitter((-5, 5), hue_factor=0.3, seed=3, data_format="channels_first"),
            (3, 2, 3),
            (3, 2, 3),
        ),
    ],
    "RandomContrast": [
        Case(lambda: L.RandomContrast((0.2, 0.5), (-5, 5), seed=3), (3, 3, 2), (3, 3, 2)),
        Case(lambda: L.RandomContrast(0.5, (-5, 5), 3, data_format="channels_first"), (1, 3, 4), (1, 3, 4)),
    ],
    "RandomCrop": [
        Case(lambda: L.RandomCrop(2, 3, seed=3), (4, 5, 2), (2, 3, 2)),
        Case(lambda: L.RandomCrop(2, 3, 3, "channels_first"), (1, 4, 2), (1, 2, 3)),
    ],
    "RandomElasticTransform": [
        Case(lambda: L.RandomElasticTransform(1.0, (0.5, 1), value_range=(-5, 5), seed=3), (8, 10, 2), (8, 10, 2)),
        Case(
            lambda: L.RandomElasticTransform(0.5, 0.5, "nearest", "constant", 0.5, (-5, 5), 3, "channels_first"),
            (1, 6, 7),
            (1, 6, 7),
        ),
    ],
    "RandomErasing": [
        Case(lambda: L.RandomErasing(value_range=(-5, 5), seed=3), (4, 4, 2), (4, 4, 2)),
        Case(lambda: L.RandomErasing((0.5, 1), 0.9, (1, 2, 3), (-5, 5), 3, "channels_first"), (3, 4, 5), (3, 4, 5)),
    ],
    "RandomFlip": [
        Case(lambda: L.RandomFlip(seed=3), (2, 3, 2), (2, 3, 2)),
        Case(lambda: L.RandomFlip("vertical", 3, "channels_first"), (1, 2, 3), (1, 2, 3)),
    ],
    "RandomGaussianBlur": [
        Case(lambda: L.RandomGaussianBlur(1.0, 3, 0.9, (-5, 5), seed=3), (4, 5, 2), (4, 5, 2)),
        Case(lambda: L.RandomGaussianBlur(0.5, (5, 3), (0.5, 1), (-5, 5), "channels_first", 3), (1, 4, 5), (1, 4, 5)),
    ],
    "RandomGrayscale": [
        Case(lambda: L.RandomGrayscale(seed=3), (3, 2, 3), (3, 2, 3)),
        Case(lambda: L.RandomGrayscale(0.7, "channels_first", 3), (3, 2, 2), (3, 2, 2)),
    ],
    "RandomHue": [
        Case(lambda: L.RandomHue(0.4, (-5, 5), seed=3), (3, 2, 3), (3, 2, 3)),
        Case(lambda: L.RandomHue((0.1, 0.9), (-6, 6), "channels_first", 3), (3, 2, 2), (3, 2, 2)),
    ],
    "RandomInvert": [
        Case(lambda: L.RandomInvert(value_range=(-1, 1), seed=3), (3, 2, 2), (3, 2, 2)),
    ],
    "RandomPerspective": [
        Case(lambda: L.RandomPerspective(1.0, 0.7, seed=3), (4, 5, 2), (4, 5, 2)),
        Case(lambda: L.RandomPerspective(0.8, 0.4, "nearest", 0.5, 3, "channels_first"), (1, 3, 4), (1, 3, 4)),
    ],
    "RandomPosterization": [
        Case(lambda: L.RandomPosterization(4, (-5, 5), seed=3), (3, 2, 2), (3, 2, 2)),
        Case(lambda: L.RandomPosterization(1, (-5, 5), "channels_first", 3), (2, 2, 2), (2, 2, 2)),
    ],
    "RandomRotation": [
        Case(lambda: L.RandomRotation(0.2, seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.RandomRotation((-0.1, 0.3), "constant", "nearest", 3, 0.5), (3, 3, 1), (3, 3, 1)),
    ],
    "RandomSaturation": [
        Case(lambda: L.RandomSaturation((0.2, 0.7), (-5, 5), seed=3), (3, 2, 3), (3, 2, 3)),
        Case(lambda: L.RandomSaturation(0.6, (-5, 5), "channels_first", 3), (3, 2, 2), (3, 2, 2)),
    ],
    "RandomSharpness": [
        Case(lambda: L.RandomSharpness(0.9, (-5, 5), seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.RandomSharpness((0.1, 0.4), (-5, 5), "channels_first", 3), (2, 3, 4), (2, 3, 4)),
    ],
    "RandomShear": [
        Case(lambda: L.RandomShear(0.3, 0.2, seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.RandomShear((0.1, 0.5), 0.4, "nearest", "wrap", 0.5, "channels_first", 3), (1, 3, 4), (1, 3, 4)),
    ],
    "RandomTranslation": [
        Case(lambda: L.RandomTranslation(0.3, (-0.1, 0.2), seed=3), (3, 4, 2), (3, 4, 2)),
        Case(
            lambda: L.RandomTranslation(0.5, 0.4, "wrap", seed=3, data_format="channels_first"),
            *((1, 3, 4), (1, 3, 4)),
        ),
    ],
    "RandomZoom": [
        Case(lambda: L.RandomZoom(0.3, seed=3), (3, 4, 2), (3, 4, 2)),
        Case(lambda: L.RandomZoom((-0.3, 0.1), 0.2, "nearest", seed=3), (3, 3, 1), (3, 3, 1)),
    ],
    "ReLU": [
        Case(lambda: L.ReLU(negative_slope=0.1), (3,), (3,)),
        Case(lambda: L.ReLU(0.9, 0.2, 0.3), (3, 5), (3, 5)),
    ],
    "RepeatVector": [Case(lambda: L.RepeatVector(3), (4,), (3, 4))],
    "Rescaling": [
        Case(lambda: L.Rescaling(0.5, 1), (3,), (3,)),
        Case(lambda: L.Rescaling([0.5, 2, -1], [1, 0, 0.5]), (2, 3), (2, 3)),
    ],
    "Reshape": [Case(lambda: L.Reshape([-1, 2]), (3, 4), (6, 2))],
    "Resizing": [
        Case(lambda: L.Resizing(5, 2), (3, 4, 2), (5, 2, 2)),
        Case(
            lambda: L.Resizing(
                2, 3, "bicubic", crop_to_aspect_ratio=True, antialias=True, data_format="channels_first"
            ),
            *((1, 5, 4), (1, 2, 3)),
        ),
    ],
    "ReversibleEmbedding": [
        Case(lambda: L.ReversibleEmbedding(7, 3, embeddings_regularizer="l2"), (4,), (4, 3), integers=7),
        Case(lambda: L.ReversibleEmbedding(5, 3, logit_soft_cap=0.1), (2, 3), (2, 5), reverse=True),
        Case(lambda: L.ReversibleEmbedding(5, 3, lora_rank=2), (2, 3), (2, 5), reverse=True),
    ],
    "STFTSpectrogram": [
        *(
            Case(lambda mode=mode: L.STFTSpectrogram(mode, 8, 4), (20, 2), (4, 10 if mode != "stft" else 20))
            for mode in ("log", "magnitude", "psd", "real", "imag", "stft")
        ),
        Case(lambda: L.STFTSpectrogram("log", 6, 3, 8, None, padding="same", expand_dims=True), (20, 2), (7, 5, 2)),
        Case(
            lambda: L.STFTSpectrogram("psd", 6, 3, 8, "hamming", True, "spectrum", data_format="channels_first"),
            *((2, 20), (10, 5)),
        ),
    ],
    "SeparableConv1D": [
        Case(lambda: L.SeparableConv1D(3, 2, depth_multiplier=2, pointwise_regularizer="l2"), (4, 2), (3, 3)),
        Case(lambda: L.SeparableConv1D(2, 3, padding="same", data_format="channels_first"), (2, 4), (2, 4)),
    ],
    "SeparableConv2D": [
        Case(lambda: L.SeparableConv2D(3, 2, (2, 1), activation="tanh", bias_initializer="ones"), (4, 3, 2), (2, 2, 3)),
    ],
    "Softmax": [
        *(Case(L.Softmax, (3,), (3,)), Case(lambda: L.Softmax(axis=1), (3, 4), (3, 4))),
        Case(lambda: L.Softmax([1, 2]), (3, 4), (3, 4)),
    ],
    "Solarization": [
        Case(lambda: L.Solarization(0.2, 0.5, (-5, 5), 3), (3, 2, 2), (3, 2, 2)),
        Case(
            lambda: L.Solarization((0.1, 0.3), (0, 1), (-5, 5), 3, data_format="channels_first"), (2, 2, 2), (2, 2, 2)
        ),
    ],
    "SpatialDropout1D": [Case(lambda: L.SpatialDropout1D(0.4, 3), (3, 4), (3, 4))],
    "SpatialDropout2D": [
        Case(lambda: L.SpatialDropout2D(0.4, seed=3), (2, 2, 4), (2, 2, 4)),
        Case(lambda: L.SpatialDropout2D(0.4, "channels_first", 3), (4, 2, 2), (4, 2, 2)),
    ],
    "SpatialDropout3D": [Case(lambda: L.SpatialDropout3D(0.4, seed=3), (2, 1, 2, 4), (2, 1, 2, 4))],
    "SpectralNormalization": [
        Case(lambda: L.SpectralNormalization(L.Dense(3, "tanh", name="inner")), (4,), (3,), moves=True),
        Case(lambda: L.SpectralNormalization(L.Conv2D(3, 2, name="inner"), 2), (3, 3, 2), (2, 2, 3), moves=True),
    ],
    "Subtract": [Case(L.Subtract, PAIR, (3, 2))],
    "UnitNormalization": [
        Case(L.UnitNormalization, (3, 4), (3, 4)),
        Case(lambda: L.UnitNormalization([1, 2]), (3, 4), (3, 4)),
    ],
    "UpSampling1D": [Case(lambda: L.UpSampling1D(3), (2, 2), (6, 2))],
    "UpSampling2D": [
        Case(lambda: L.UpSampling2D((2, 3)), (2, 3, 2), (4, 9, 2)),
        Case(lambda: L.UpSampling2D(2, "channels_first"), (1, 2, 3), (1, 4, 6)),
        Case(lambda: L.UpSampling2D((2, 3), interpolation="bilinear"), (2, 3, 2), (4, 9, 2)),
    ],
    "UpSampling3D": [
        Case(lambda: L.UpSampling3D((2, 1, 3)), (2, 2, 1, 2), (4, 2, 3, 2)),
        Case(lambda: L.UpSampling3D(2, "channels_first"), (1, 1, 2, 1), (1, 2, 4, 2)),
    ],
    "ZeroPadding1D": [
        Case(L.ZeroPadding1D, (2, 2), (4, 2)),
        Case(lambda: L.ZeroPadding1D((0, 2), "channels_first"), (2, 2), (2, 4)),
    ],
    "ZeroPadding2D": [
        Case(lambda: L.ZeroPadding2D(((1, 0), (2, 1))), (2, 3, 2), (3, 6, 2)),
        Case(lambda: L.ZeroPadding2D((1, 0), "channels_first"), (1, 2, 3), (1, 4, 3)),
    ],
    "ZeroPadding3D": [
        Case(L.ZeroPadding3D, (1, 2, 1, 1), (3, 4, 3, 1)),
        Case(lambda: L.ZeroPadding3D((0, 1, (2, 0)), "channels_first"), (1, 2, 1, 1), (1, 2, 3, 3)),
    ],
}
CASES |= {
    **{name: recurrent(name) for name in ("SimpleRNN", "LSTM", "GRU")},
    "ConvLSTM1D": [
        *convolutional("ConvLSTM1D", (3,), (2,)),
        Case(lambda: L.ConvLSTM1D(2, 2, dilation_rate=2, go_backwards=True), (2, 4, 1), (2, 2)),
    ],
    "ConvLSTM2D": [
        *convolutional("ConvLSTM2D", (3, 2), (2, 1)),
        Case(lambda: L.ConvLSTM2D(1, 2, 2, "same", dropout=0.3, recurrent_dropout=0.2), (2, 3, 2, 1), (2, 1, 1)),
    ],
    "ConvLSTM3D": convolutional("ConvLSTM3D", (2, 3, 2), (1, 2, 1)),
    "SimpleRNNCell": [CellCase(lambda: L.SimpleRNNCell(2), [(3,), (2,)], (2,))],
    "LSTMCell": [
        CellCase(lambda: L.LSTMCell(2), [(3,), (2,), (2,)], (2,)),
        CellCase(lambda: L.LSTMCell(2, dropout=0.5, implementation=1), [(3,), (2,), (2,)], (2,)),
    ],
    "GRUCell": [
        CellCase(lambda: L.GRUCell(2), [(3,), (2,)], (2,)),
        CellCase(lambda: L.GRUCell(2, reset_after=False, recurrent_dropout=0.5), [(3,), (2,)], (2,)),
    ],
    "RNN": [
        Case(lambda: L.RNN(L.LSTMCell(2, name="cell"), return_sequences=True), (3, 2), (3, 2)),
        Case(
            lambda: L.RNN(
                L.StackedRNNCells([L.GRUCell(3, reset_after=False, name="a"), L.LSTMCell(2, name="b")], name="cells"),
                go_backwards=True,
            ),
            *((3, 2), (2,)),
        ),
    ],
    "StackedRNNCells": [
        CellCase(
            lambda: L.StackedRNNCells([L.GRUCell(3, name="a"), L.SimpleRNNCell(2, name="b")]), [(4,), (3,), (2,)], (2,)
        )
    ],
    "Bidirectional": [
        Case(lambda: L.Bidirectional(L.LSTM(2, name="lstm")), (3, 2), (4,)),
        Case(lambda: L.Bidirectional(L.GRU(2, return_sequences=True, name="gru"), "sum"), (3, 2), (3, 2)),
        Case(
            lambda: L.Bidirectional(
                L.SimpleRNN(2, name="there"), "mul", backward_layer=L.GRU(2, go_backwards=True, name="back")
            ),
            *((3, 2), (2,)),
        ),
    ],
    "TimeDistributed": [
        Case(lambda: L.TimeDistributed(L.Dense(2, "tanh", name="inner")), (3, 2), (3, 2)),
        Case(lambda: L.TimeDistributed(L.Conv1D(2, 2, name="inner")), (2, 4, 1), (2, 3, 2)),
        Case(lambda: L.TimeDistributed(L.BatchNormalization(name="inner")), (3, 2), (3, 2), moves=True),
    ],
}
# Layers of texts and hashes, which no program has; see test_lookups.py.
ON_HOST = {"HashedCrossing", "Hashing", "StringLookup", "TextVectorization"}
ALL_CASES = [(name, number) for name, cases in CASES.items() for number in range(len(cases))]
