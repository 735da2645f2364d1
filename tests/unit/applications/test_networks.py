"""The networks: how large they are, their arguments, their weights' files; beside Keras in tests/against_keras."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import applications
from dptrain.errors import ConfigError, DataError
from tests.sample import sample

SMALL = {"alpha": 0.25, "input_shape": (32, 32, 3), "classes": 4}


@pytest.mark.parametrize(
    ("name", "parameters"),
    sample(
        [
            ("VGG16", 138_357_544),
            ("VGG19", 143_667_240),
            ("ResNet50", 25_636_712),
            ("ResNet101", 44_707_176),
            ("ResNet152", 60_419_944),
            ("ResNet50V2", 25_613_800),
            ("ResNet101V2", 44_675_560),
            ("ResNet152V2", 60_380_648),
            ("MobileNet", 4_253_864),
            ("MobileNetV2", 3_538_984),
            ("EfficientNetB0", 5_330_571),
            ("EfficientNetB1", 7_856_239),
            ("EfficientNetB2", 9_177_569),
            ("EfficientNetB3", 12_320_535),
            ("EfficientNetB4", 19_466_823),
            ("EfficientNetB5", 30_562_527),
            ("EfficientNetB6", 43_265_143),
            ("EfficientNetB7", 66_658_687),
            ("InceptionV3", 23_851_784),
            ("Xception", 22_910_480),
            ("DenseNet121", 8_062_504),
            ("DenseNet169", 14_307_880),
            ("DenseNet201", 20_242_984),
            ("MobileNetV3Small", 2_554_968),
            ("MobileNetV3Large", 5_507_432),
            ("EfficientNetV2B0", 7_200_312),
            ("EfficientNetV2B1", 8_212_124),
            ("EfficientNetV2B2", 10_178_374),
            ("EfficientNetV2B3", 14_467_622),
            ("EfficientNetV2S", 21_612_360),
            ("EfficientNetV2M", 54_431_388),
            ("EfficientNetV2L", 119_027_848),
            ("ConvNeXtTiny", 28_589_128),
            ("ConvNeXtSmall", 50_223_688),
            ("ConvNeXtBase", 88_591_464),
            ("ConvNeXtLarge", 197_767_336),
            ("ConvNeXtXLarge", 350_196_968),
        ],
        3,
    ),
)
def test_size(name, parameters):
    """Keras 3.15's numbers."""
    make = getattr(applications, name)
    model = make(weights=None)
    assert model.count_params() == parameters
    assert make.__name__ == name
    assert "file of Keras' or dptrain's" in make.__doc__ or "see `applications.ResNet50`" in make.__doc__


def test_any_size_and_the_smallest():
    assert applications.MobileNetV3Small(weights=None).input_shape == (None, None, None, 3)
    with pytest.raises(ConfigError, match="at least 75x75"):
        applications.InceptionV3(weights=None, input_shape=(74, 80, 3))


def test_a_file_of_weights(tmp_path):
    first = applications.MobileNet(weights=None, **SMALL)
    first.save_weights(tmp_path / "w.weights.h5")
    second = applications.MobileNet(weights=tmp_path / "w.weights.h5", name="again", **SMALL)
    x = np.ones((2, 32, 32, 3), np.float32)
    np.testing.assert_array_equal(first(x).numpy(), second(x).numpy())
    assert second.name == "again"
    with pytest.raises(DataError, match="do not fit the model"):
        applications.MobileNet(weights=tmp_path / "w.weights.h5", **{**SMALL, "classes": 5})
    with pytest.raises(DataError, match=r"none\.weights\.h5: not found"):
        applications.MobileNet(weights=tmp_path / "none.weights.h5", **SMALL)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "imagenet"}, "downloads nothing; pass weights=FILE"),
        ({}, "downloads nothing; pass weights=FILE"),
        ({"weights": None, "input_shape": (31, 32, 3)}, "at least 32x32"),
        ({"weights": None, "input_shape": (32, 32)}, "three integers"),
        ({"weights": None, "input_shape": (None, 32, 3)}, "static `input_shape`"),
        ({"weights": None, "pooling": "sum", "include_top": False}, "pooling = 'sum'"),
        ({"weights": "x.weights.h5", "classifier_activation": "relu"}, "Only `None` and `softmax`"),
        ({"weights": None, "input_tensor": np.ones((1, 32, 32, 3))}, "expected an `Input`"),
    ],
)
@pytest.mark.parametrize("name", ["ResNet50", "MobileNet"])
def test_what_no_network_can_do(name, options, message):
    with pytest.raises(ConfigError, match=message) as caught:
        getattr(applications, name)(**options)
    assert "\n" not in str(caught.value)


def test_a_network_on_top_of_other_layers():
    inputs = dp.layers.Input((64, 64, 1), name="grey")
    coloured = dp.layers.Concatenate()([inputs, inputs, dp.ops.negative(inputs)])
    model = applications.MobileNetV2(input_tensor=coloured, alpha=0.35, weights=None, include_top=False, pooling="avg")
    assert [layer.name for layer in model.layers][:2] == ["grey", "concatenate"]
    assert model.output_shape == (None, 1280)
    assert dp.utils.get_source_inputs(model.output) == [inputs]
    assert applications.MobileNetV2(input_tensor=dp.layers.Input((96, 96, 3)), weights=None).name.endswith("1.00_96")


def test_two_inputs_are_found_in_order():
    a, b = dp.layers.Input((3,)), dp.layers.Input((3,))
    assert dp.utils.get_source_inputs(dp.layers.Add()([b, dp.layers.Add()([a, b])])) == [b, a]


def test_a_frozen_network_takes_pictures_of_any_size():
    """Transfer: a frozen network of any size of pictures, and a classifier of one's own."""
    base = applications.MobileNet(alpha=0.25, weights=None, include_top=False, pooling="avg")
    base.trainable = False
    model = dp.Sequential([base, dp.layers.Dense(2, "softmax")])
    model.compile("sgd", "sparse_categorical_crossentropy", jit_compile=False)
    before = base.get_weights()
    for size in (32, 40):
        model.fit(np.ones((4, size, size, 3)), np.arange(4) % 2, verbose=0)
    for weight, other in zip(before, base.get_weights(), strict=True):
        np.testing.assert_array_equal(weight, other)
