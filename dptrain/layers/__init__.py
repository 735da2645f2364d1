"""Keras' layers: what to compute, in ops. A new layer is a class in a room here, as in Keras, and a line below."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dptrain.layers import operation_layer as _operation_layer  # noqa: F401  # for ops on open shapes
from dptrain.layers.activation import ELU, Activation, ActivityRegularization, Identity, LeakyReLU, PReLU, ReLU, Softmax
from dptrain.layers.attention.attention import AdditiveAttention, Attention
from dptrain.layers.attention.multi_head_attention import GroupQueryAttention, MultiHeadAttention
from dptrain.layers.base import Layer, build_as_described
from dptrain.layers.convolution import (
    Conv1D,
    Conv1DTranspose,
    Conv2D,
    Conv2DTranspose,
    Conv3D,
    Conv3DTranspose,
    Convolution1D,
    Convolution1DTranspose,
    Convolution2D,
    Convolution2DTranspose,
    Convolution3D,
    Convolution3DTranspose,
    DepthwiseConv1D,
    DepthwiseConv2D,
    SeparableConv1D,
    SeparableConv2D,
    SeparableConvolution1D,
    SeparableConvolution2D,
)
from dptrain.layers.core.dense import Dense
from dptrain.layers.core.einsum_dense import EinsumDense
from dptrain.layers.core.embedding import Embedding
from dptrain.layers.core.input import Input, InputLayer
from dptrain.layers.core.lambda_layer import Lambda
from dptrain.layers.core.masking import Masking
from dptrain.layers.core.reversible_embedding import ReversibleEmbedding
from dptrain.layers.core.wrapper import Wrapper
from dptrain.layers.input_spec import InputSpec
from dptrain.layers.merging import (
    Add,
    Average,
    Concatenate,
    Dot,
    Maximum,
    Minimum,
    Multiply,
    Subtract,
    add,
    average,
    concatenate,
    dot,
    maximum,
    minimum,
    multiply,
    subtract,
)
from dptrain.layers.normalization.batch_normalization import BatchNormalization
from dptrain.layers.normalization.group_normalization import GroupNormalization, RMSNormalization, UnitNormalization
from dptrain.layers.normalization.layer_normalization import LayerNormalization
from dptrain.layers.normalization.spectral_normalization import SpectralNormalization
from dptrain.layers.pooling import (
    AdaptiveAveragePooling1D,
    AdaptiveAveragePooling2D,
    AdaptiveAveragePooling3D,
    AdaptiveMaxPooling1D,
    AdaptiveMaxPooling2D,
    AdaptiveMaxPooling3D,
    AveragePooling1D,
    AveragePooling2D,
    AveragePooling3D,
    AvgPool1D,
    AvgPool2D,
    AvgPool3D,
    GlobalAveragePooling1D,
    GlobalAveragePooling2D,
    GlobalAveragePooling3D,
    GlobalAvgPool1D,
    GlobalAvgPool2D,
    GlobalAvgPool3D,
    GlobalMaxPool1D,
    GlobalMaxPool2D,
    GlobalMaxPool3D,
    GlobalMaxPooling1D,
    GlobalMaxPooling2D,
    GlobalMaxPooling3D,
    MaxPool1D,
    MaxPool2D,
    MaxPool3D,
    MaxPooling1D,
    MaxPooling2D,
    MaxPooling3D,
)
from dptrain.layers.preprocessing.augmentation import (
    RandomCrop,
    RandomElasticTransform,
    RandomFlip,
    RandomPerspective,
    RandomRotation,
    RandomShear,
    RandomTranslation,
    RandomZoom,
)
from dptrain.layers.preprocessing.categories import CategoryEncoding, Discretization
from dptrain.layers.preprocessing.colors import (
    AutoContrast,
    ContrastLimitedAdaptiveHistogramEqualization,
    Equalization,
    RandomBrightness,
    RandomColorDegeneration,
    RandomColorJitter,
    RandomContrast,
    RandomErasing,
    RandomGaussianBlur,
    RandomGrayscale,
    RandomHue,
    RandomInvert,
    RandomPosterization,
    RandomSaturation,
    RandomSharpness,
    Solarization,
)
from dptrain.layers.preprocessing.images import CenterCrop, MaxNumBoundingBoxes, Resizing
from dptrain.layers.preprocessing.lookups import HashedCrossing, Hashing, IntegerLookup, StringLookup
from dptrain.layers.preprocessing.mixing import AugMix, CutMix, MixUp, RandAugment
from dptrain.layers.preprocessing.pipeline import Pipeline
from dptrain.layers.preprocessing.rescaling import Rescaling
from dptrain.layers.preprocessing.spectrograms import MelSpectrogram, STFTSpectrogram
from dptrain.layers.preprocessing.standardization import Normalization
from dptrain.layers.preprocessing.text_vectorization import TextVectorization
from dptrain.layers.recurrent.bidirectional import Bidirectional
from dptrain.layers.recurrent.conv_lstm import ConvLSTM1D, ConvLSTM2D, ConvLSTM3D
from dptrain.layers.recurrent.gru import GRU, GRUCell
from dptrain.layers.recurrent.lstm import LSTM, LSTMCell
from dptrain.layers.recurrent.rnn import RNN
from dptrain.layers.recurrent.simple_rnn import SimpleRNN, SimpleRNNCell
from dptrain.layers.recurrent.stacked import StackedRNNCells
from dptrain.layers.recurrent.time_distributed import TimeDistributed
from dptrain.layers.regularization.dropout import Dropout, SpatialDropout1D, SpatialDropout2D, SpatialDropout3D
from dptrain.layers.regularization.noise import AlphaDropout, GaussianDropout, GaussianNoise
from dptrain.layers.reshaping.borders import (
    Cropping1D,
    Cropping2D,
    Cropping3D,
    ZeroPadding1D,
    ZeroPadding2D,
    ZeroPadding3D,
)
from dptrain.layers.reshaping.shapes import Flatten, Permute, RepeatVector, Reshape
from dptrain.layers.reshaping.upsampling import UpSampling1D, UpSampling2D, UpSampling3D
from dptrain.registry.names import not_there
from dptrain.registry.serialization import Registry, plain

# Names as Keras' configurations have them; serialisation and the test matrix read this table.
LAYERS: dict[str, type[Layer]] = {
    cls.__name__: cls
    for cls in (
        AdditiveAttention,
        Attention,
        GroupQueryAttention,
        MultiHeadAttention,
        ReversibleEmbedding,
        AdaptiveAveragePooling1D,
        AdaptiveAveragePooling2D,
        AdaptiveAveragePooling3D,
        AdaptiveMaxPooling1D,
        AdaptiveMaxPooling2D,
        AdaptiveMaxPooling3D,
        ContrastLimitedAdaptiveHistogramEqualization,
        MaxNumBoundingBoxes,
        AugMix,
        AutoContrast,
        CutMix,
        Equalization,
        MixUp,
        Pipeline,
        RandAugment,
        RandomColorDegeneration,
        RandomColorJitter,
        RandomElasticTransform,
        RandomErasing,
        RandomGaussianBlur,
        RandomGrayscale,
        RandomHue,
        RandomInvert,
        RandomPerspective,
        RandomPosterization,
        RandomSaturation,
        RandomSharpness,
        RandomShear,
        Solarization,
        HashedCrossing,
        Hashing,
        IntegerLookup,
        StringLookup,
        TextVectorization,
        MelSpectrogram,
        STFTSpectrogram,
        Resizing,
        CenterCrop,
        Discretization,
        CategoryEncoding,
        RandomZoom,
        RandomTranslation,
        RandomRotation,
        RandomFlip,
        RandomCrop,
        RandomContrast,
        RandomBrightness,
        SpectralNormalization,
        Bidirectional,
        ConvLSTM1D,
        ConvLSTM2D,
        ConvLSTM3D,
        GRU,
        GRUCell,
        LSTM,
        LSTMCell,
        RNN,
        SimpleRNN,
        SimpleRNNCell,
        StackedRNNCells,
        TimeDistributed,
        Masking,
        EinsumDense,
        UnitNormalization,
        RMSNormalization,
        GroupNormalization,
        GaussianNoise,
        GaussianDropout,
        AlphaDropout,
        SpatialDropout3D,
        SpatialDropout2D,
        SpatialDropout1D,
        PReLU,
        ActivityRegularization,
        Activation,
        Add,
        Average,
        AveragePooling1D,
        AveragePooling2D,
        AveragePooling3D,
        BatchNormalization,
        Concatenate,
        Conv1D,
        Conv1DTranspose,
        Conv2D,
        Conv2DTranspose,
        Conv3D,
        Conv3DTranspose,
        Cropping1D,
        Cropping2D,
        Cropping3D,
        Dense,
        DepthwiseConv1D,
        DepthwiseConv2D,
        Dot,
        Dropout,
        ELU,
        Embedding,
        Flatten,
        GlobalAveragePooling1D,
        GlobalAveragePooling2D,
        GlobalAveragePooling3D,
        GlobalMaxPooling1D,
        GlobalMaxPooling2D,
        GlobalMaxPooling3D,
        Identity,
        InputLayer,
        Lambda,
        LayerNormalization,
        LeakyReLU,
        MaxPooling1D,
        MaxPooling2D,
        MaxPooling3D,
        Maximum,
        Minimum,
        Multiply,
        Normalization,
        Permute,
        ReLU,
        RepeatVector,
        Rescaling,
        Reshape,
        SeparableConv1D,
        SeparableConv2D,
        Softmax,
        Subtract,
        UpSampling1D,
        UpSampling2D,
        UpSampling3D,
        ZeroPadding1D,
        ZeroPadding2D,
        ZeroPadding3D,
    )
}

__all__ = [
    "ELU",
    "GRU",
    "LAYERS",
    "LSTM",
    "RNN",
    "Activation",
    "ActivityRegularization",
    "AdaptiveAveragePooling1D",
    "AdaptiveAveragePooling2D",
    "AdaptiveAveragePooling3D",
    "AdaptiveMaxPooling1D",
    "AdaptiveMaxPooling2D",
    "AdaptiveMaxPooling3D",
    "Add",
    "AdditiveAttention",
    "AlphaDropout",
    "Attention",
    "AugMix",
    "AutoContrast",
    "Average",
    "AveragePooling1D",
    "AveragePooling2D",
    "AveragePooling3D",
    "AvgPool1D",
    "AvgPool2D",
    "AvgPool3D",
    "BatchNormalization",
    "Bidirectional",
    "CategoryEncoding",
    "CenterCrop",
    "Concatenate",
    "ContrastLimitedAdaptiveHistogramEqualization",
    "Conv1D",
    "Conv1DTranspose",
    "Conv2D",
    "Conv2DTranspose",
    "Conv3D",
    "Conv3DTranspose",
    "ConvLSTM1D",
    "ConvLSTM2D",
    "ConvLSTM3D",
    "Convolution1D",
    "Convolution1DTranspose",
    "Convolution2D",
    "Convolution2DTranspose",
    "Convolution3D",
    "Convolution3DTranspose",
    "Cropping1D",
    "Cropping2D",
    "Cropping3D",
    "CutMix",
    "Dense",
    "DepthwiseConv1D",
    "DepthwiseConv2D",
    "Discretization",
    "Dot",
    "Dropout",
    "EinsumDense",
    "Embedding",
    "Equalization",
    "Flatten",
    "GRUCell",
    "GaussianDropout",
    "GaussianNoise",
    "GlobalAveragePooling1D",
    "GlobalAveragePooling2D",
    "GlobalAveragePooling3D",
    "GlobalAvgPool1D",
    "GlobalAvgPool2D",
    "GlobalAvgPool3D",
    "GlobalMaxPool1D",
    "GlobalMaxPool2D",
    "GlobalMaxPool3D",
    "GlobalMaxPooling1D",
    "GlobalMaxPooling2D",
    "GlobalMaxPooling3D",
    "GroupNormalization",
    "GroupQueryAttention",
    "HashedCrossing",
    "Hashing",
    "Identity",
    "Input",
    "InputLayer",
    "InputSpec",
    "IntegerLookup",
    "LSTMCell",
    "Lambda",
    "Layer",
    "LayerNormalization",
    "LeakyReLU",
    "Masking",
    "MaxNumBoundingBoxes",
    "MaxPool1D",
    "MaxPool2D",
    "MaxPool3D",
    "MaxPooling1D",
    "MaxPooling2D",
    "MaxPooling3D",
    "Maximum",
    "MelSpectrogram",
    "Minimum",
    "MixUp",
    "MultiHeadAttention",
    "Multiply",
    "Normalization",
    "PReLU",
    "Permute",
    "Pipeline",
    "RMSNormalization",
    "RandAugment",
    "RandomBrightness",
    "RandomColorDegeneration",
    "RandomColorJitter",
    "RandomContrast",
    "RandomCrop",
    "RandomElasticTransform",
    "RandomErasing",
    "RandomFlip",
    "RandomGaussianBlur",
    "RandomGrayscale",
    "RandomHue",
    "RandomInvert",
    "RandomPerspective",
    "RandomPosterization",
    "RandomRotation",
    "RandomSaturation",
    "RandomSharpness",
    "RandomShear",
    "RandomTranslation",
    "RandomZoom",
    "ReLU",
    "RepeatVector",
    "Rescaling",
    "Reshape",
    "Resizing",
    "ReversibleEmbedding",
    "STFTSpectrogram",
    "SeparableConv1D",
    "SeparableConv2D",
    "SeparableConvolution1D",
    "SeparableConvolution2D",
    "SimpleRNN",
    "SimpleRNNCell",
    "Softmax",
    "Solarization",
    "SpatialDropout1D",
    "SpatialDropout2D",
    "SpatialDropout3D",
    "SpectralNormalization",
    "StackedRNNCells",
    "StringLookup",
    "Subtract",
    "TextVectorization",
    "TimeDistributed",
    "UnitNormalization",
    "UpSampling1D",
    "UpSampling2D",
    "UpSampling3D",
    "Wrapper",
    "ZeroPadding1D",
    "ZeroPadding2D",
    "ZeroPadding3D",
    "add",
    "average",
    "concatenate",
    "deserialize",
    "dot",
    "maximum",
    "minimum",
    "multiply",
    "serialize",
    "subtract",
]

if not TYPE_CHECKING:  # type checkers would accept any name
    __getattr__ = not_there("layers", __all__)

_registry: Registry[Layer] = Registry("layer", "keras.layers", Layer, LAYERS)


def serialize(layer: Layer) -> dict[str, Any]:
    """Return Keras' description of a layer or a model: "module", "class_name", "config", "registered_name".

    Of a built layer also "build_config"; a model is described without weights.
    """
    if "_graph" in vars(layer):  # a model, of a higher room than this module
        from dptrain.saving import serialize_keras_object

        return serialize_keras_object(layer)  # type: ignore[no-any-return]
    build_config = layer.get_build_config()
    return _registry.serialize(layer) | ({} if build_config is None else {"build_config": plain(build_config)})


def deserialize(config: str | Mapping[str, Any], custom_objects: Mapping[str, Any] | None = None) -> Layer:
    """Return the layer or model that `serialize`, or Keras, described, with new weights.

    Args:
        config: with "class_name" and "config"; or the name of a layer.
        custom_objects: the user's classes by name.

    Raises:
        ConfigError: the class is unknown, or an argument is unknown, out of range or not supported.
    """
    if isinstance(config, Mapping) and config.get("class_name") in ("Sequential", "Functional", "Model"):
        from dptrain.saving import deserialize_keras_object

        return deserialize_keras_object(config, custom_objects)  # type: ignore[no-any-return]
    layer = _registry.deserialize(config, custom_objects)
    build_as_described(layer, config.get("build_config") if isinstance(config, Mapping) else None)
    return layer
