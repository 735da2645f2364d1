"""Every layer, activation and regularizer in a small network: 200 steps from Keras' weights, in float64."""

import functools
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain import activations, initializers, layers, regularizers
from tests.unit.layers.cases import ALL_CASES, CASES, shifted

pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning"),  # of Keras' variables
    pytest.mark.filterwarnings("ignore:Tensor.T is deprecated:UserWarning"),
]
SAMPLES, BATCH, EPOCHS = 95, 10, 20  # 10 steps an epoch, the last of 5 samples


def activation_layers(k):
    """Return dense layers and activations."""
    L = k.layers
    return {
        **{f"dense {name}": lambda name=name: [L.Dense(6, activation=name)] for name in NAMES},
        **{f"activation {name}": lambda name=name: [L.Activation(name)] for name in NAMES},
        "function": lambda: [L.Dense(6, k.activations.gelu), L.Activation(k.activations.elu)],
        "relu": lambda: [L.ReLU()],
        "relu with a slope": lambda: [L.ReLU(negative_slope=0.2)],
        "relu with limits": lambda: [L.ReLU(1.0, 0.1, 0.3)],
        "leaky relu": lambda: [L.LeakyReLU()],
        "leaky relu with a slope": lambda: [L.LeakyReLU(0.05)],
        "elu": lambda: [L.ELU(alpha=0.7)],
        "softmax": lambda: [L.Softmax()],
        "softmax of an axis": lambda: [L.Reshape((2, 4)), L.Softmax(axis=1), L.Flatten()],
        "dense of two axes": lambda: [L.Reshape((2, 4)), L.Dense(5, "tanh"), L.Flatten()],
    }


def window_layers(k):
    """Return convolutions and pooling."""
    L = k.layers
    return {
        "convolution": lambda: [
            L.Reshape((4, 2, 1)),
            L.Conv2D(3, 2, padding="same", activation="tanh"),
            L.Conv2D(2, (3, 1), (2, 1), bias_regularizer="l2"),
            L.Flatten(),
        ],
        "dilated convolution": lambda: [L.Reshape((4, 2, 1)), L.Conv2D(3, (2, 1), dilation_rate=(2, 1)), L.Flatten()],
        "transposed convolution": lambda: [
            L.Reshape((2, 2, 2)),
            L.Conv2DTranspose(3, 3, 2, "same", activation="relu"),
            L.Conv2DTranspose(2, (2, 1), use_bias=False),
            L.Flatten(),
        ],
        "pooling": lambda: [
            *(L.Reshape((4, 2, 1)), L.UpSampling2D((1, 2)), L.MaxPooling2D((2, 2), 1, "same")),
            *(L.AveragePooling2D((3, 2), padding="same"), L.Flatten()),
        ],
        "global pooling": lambda: [
            *(L.Reshape((2, 1, 4)), L.ZeroPadding2D((1, 0)), L.Conv2D(5, (2, 1)), L.GlobalAveragePooling2D()),
            *(L.RepeatVector(4), L.Reshape((2, 2, 5)), L.Permute((3, 1, 2)), L.GlobalMaxPooling2D()),
        ],
        "convolutions over one axis": lambda: [
            *(L.Reshape((8, 1)), L.Conv1D(4, 3, padding="causal", activation="tanh"), L.MaxPooling1D(2, 1, "same")),
            *(L.Conv1D(4, 2, 2, groups=2), L.Conv1DTranspose(3, 2, 2), L.UpSampling1D(2), L.Cropping1D((1, 2))),
            *(L.SeparableConv1D(4, 3, padding="same", depth_multiplier=2), L.DepthwiseConv1D(2, dilation_rate=2)),
            *(L.AveragePooling1D(3), L.ZeroPadding1D(1), L.GlobalMaxPooling1D()),
        ],
        "convolutions of single channels": lambda: [
            *(L.Reshape((2, 2, 2)), L.DepthwiseConv2D(3, padding="same", depth_multiplier=2, activation="tanh")),
            *(L.Conv2D(8, (1, 2), groups=4), L.SeparableConv2D(3, (2, 1)), L.Flatten()),
        ],
        "convolutions over three axes": lambda: [
            *(
                L.Reshape((2, 2, 2, 1)),
                L.Conv3D(4, 2, padding="same", activation="tanh"),
                L.Conv3D(2, (1, 2, 1), groups=2),
            ),
            *(L.Conv3DTranspose(2, (2, 1, 2), (1, 1, 2)), L.ZeroPadding3D((1, 0, 0)), L.MaxPooling3D((2, 1, 2), 1)),
            *(L.AveragePooling3D((2, 1, 1)), L.UpSampling3D((1, 2, 1)), L.Cropping3D(((0, 0), (1, 0), (0, 1)))),
            *(L.GlobalAveragePooling3D(),),
        ],
        "channels first": lambda: [
            *(L.Reshape((2, 2, 2)), L.Conv2D(4, 2, padding="same", data_format="channels_first", activation="tanh")),
            *(
                L.Conv2DTranspose(2, 2, 2, data_format="channels_first"),
                L.MaxPooling2D(2, data_format="channels_first"),
            ),
            *(L.ZeroPadding2D((1, 0), "channels_first"), L.DepthwiseConv2D((2, 1), data_format="channels_first")),
            *(L.Flatten("channels_first"),),
        ],
    }


def shape_and_scale_layers(k):
    """Return what normalizes, rescales and reshapes."""
    L = k.layers
    return {
        "elements": lambda: [
            *(L.PReLU("he_normal"), L.Reshape((2, 4)), L.PReLU(shared_axes=[1])),
            *(L.EinsumDense("abc,cd->abd", (2, 3), "tanh", "d"), L.Flatten(), L.ActivityRegularization(1 / 128, 0.125)),
        ],
        "normalization within samples": lambda: [
            *(
                L.Reshape((2, 4)),
                L.GroupNormalization(2),
                L.RMSNormalization(),
                L.GroupNormalization(-1, 1),
                L.Flatten(),
            ),
        ],
        "batch normalization of an axis": lambda: [
            *(L.Reshape((2, 4)), L.BatchNormalization(1, 0.9), L.Flatten(), L.BatchNormalization(renorm=True)),
            L.BatchNormalization(renorm=True, renorm_clipping={"rmin": 0.8, "rmax": 1.2, "dmax": 0.3}),
        ],
        "spectral normalization": lambda: [L.SpectralNormalization(L.Dense(6, "tanh", name="inner"))],
        "layer normalization": lambda: [
            L.LayerNormalization(),
            L.Reshape((2, 4)),
            L.LayerNormalization([1, 2]),
            L.Flatten(),
        ],
        "activity": lambda: [L.Dense(6, activity_regularizer="l2"), L.Identity()],
        "rescaling": lambda: [L.Rescaling(-0.5, 0.25), L.Rescaling([0.5, -1.0] * 4, offset=[1.0, 0.5] * 4)],
        # Given, since Keras does not look at moments that `set_weights` changes.
        "normalization": lambda: [L.Normalization(mean=0.25, variance=4.0), L.Normalization(-1, 1.5, 0.5, invert=True)],
        "reshape": lambda: [L.Reshape((4, -1)), L.Reshape((8,))],
        "flatten": lambda: [L.Reshape((2, 4)), L.Flatten()],
    }


def regularized_layers(k):
    """Return layers with arguments of training."""
    L = k.layers
    return {
        "no dropout": lambda: [L.Dropout(0.0)],
        "batch normalization": lambda: [L.BatchNormalization()],
        "batch normalization, other arguments": lambda: [
            L.BatchNormalization(momentum=0.8, epsilon=0.01, center=False),
            L.BatchNormalization(scale=False, moving_variance_initializer=k.initializers.Constant(0.5)),
        ],
        "batch normalization of two axes": lambda: [L.Reshape((2, 4)), L.BatchNormalization(), L.Flatten()],
        "frozen batch normalization": lambda: [L.BatchNormalization(trainable=False)],
        "frozen dense": lambda: [L.Dense(6, activation="gelu", trainable=False), L.Dense(6, "relu", trainable=False)],
        "l1": lambda: [L.Dense(6, kernel_regularizer="l1")],
        "l2": lambda: [L.Dense(6, kernel_regularizer="l2", bias_regularizer=k.regularizers.L1(0.003))],
        "l1 and l2": lambda: [L.Dense(6, kernel_regularizer=k.regularizers.l1_l2(l1=0.02, l2=0.03))],
        "orthogonal": lambda: [
            L.Dense(6, kernel_regularizer=k.regularizers.OrthogonalRegularizer(0.1)),
            L.Dense(6, kernel_regularizer=k.regularizers.OrthogonalRegularizer(0.1, "columns")),
        ],
        "frozen and regularized": lambda: [L.Dense(6, kernel_regularizer="l2", trainable=False)],
        "regularized batch normalization": lambda: [
            L.BatchNormalization(beta_regularizer=k.regularizers.L2(0.1), gamma_regularizer=k.regularizers.L1(0.1))
        ],
    }


def middles(k):
    """Return name -> layers of module k (dptrain or Keras) that stand between two dense layers."""
    return {**activation_layers(k), **window_layers(k), **shape_and_scale_layers(k), **regularized_layers(k)}


# "threshold" and "glu" need arguments or an even length.
NAMES = [name for name in activations.BY_NAME if name not in ("threshold", "glu")]


def stack(k, name):
    middle = middles(k)[name]()
    return [k.Input((5,)), k.layers.Dense(8, "tanh"), *middle, k.layers.Dense(3)]


def nearest_of_the_simplex(keras):
    """Return sparsemax as its paper has it: Keras 3.15's adds up sums of elements (its issue 23425)."""
    ops = keras.ops
    wrong = ops.convert_to_numpy(keras.activations.sparsemax(np.array([0.5, 0.5])))
    assert wrong.sum() == 0.5, "Keras' own is right now: compare with that"

    def sparsemax(x, axis=-1):
        assert axis == -1
        ordered = ops.flip(ops.sort(x, -1), -1)
        above = ops.cast(1 + ops.arange(1, x.shape[-1] + 1) * ordered > ops.cumsum(ordered, -1), x.dtype)
        threshold = (ops.sum(above * ordered, -1, keepdims=True) - 1) / ops.sum(above, -1, keepdims=True)
        return ops.relu(x - threshold)

    return sparsemax


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [(name, "sgd") for name in middles(dp) if not name.startswith("dense ")]
    + [(name, "adam") for name in middles(dp) if not name.startswith("activation ")],
)
def test_200_steps(keras, monkeypatch, name, optimizer):
    if name == "spectral normalization" and keras.backend.backend() == "jax":
        pytest.skip("on JAX Keras trains the kernel as it was before it is normalized")
    if "sparsemax" in name:
        monkeypatch.setattr(keras.src.backend.nn, "sparsemax", nearest_of_the_simplex(keras))
    keras.utils.set_random_seed(1)
    rng = np.random.default_rng(0)
    x = rng.standard_normal((SAMPLES, 5))
    y = np.sin(x[:, :3]) + 0.1 * rng.standard_normal((SAMPLES, 3))
    theirs = keras.Sequential(stack(keras, name))
    ours = dp.Sequential(stack(dp, name))
    ours.build((None, 5))
    assert [layer.name.rstrip("_0123456789") for layer in ours.layers] == [
        layer.name.rstrip("_0123456789") for layer in theirs.layers
    ]
    start = [w + 0.1 * rng.random(w.shape) for w in theirs.get_weights()]  # biases and the like off zero
    rate = {"sgd": 0.05, "adam": 0.01}[optimizer]
    kind = {"sgd": "SGD", "adam": "Adam"}[optimizer]
    theirs.compile(getattr(keras.optimizers, kind)(rate), "mse", metrics=["mae"])
    ours.compile(getattr(dp.optimizers, kind)(rate), "mse", metrics=["mae"], dtype="float64", jit_compile=False)
    theirs.set_weights(start)
    ours.set_weights(start)  # only now: before `compile` the weights are float32
    arguments = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    their_history = theirs.fit(x, y, validation_data=(x[:33], y[:33]), **arguments).history
    our_history = ours.fit(x, y, validation_data=(x[:33], y[:33]), **arguments).history
    assert sorted(our_history) == sorted(their_history)
    # PyTorch's gradient of the hard sigmoid is 1/6 in float32.
    rtol = 1e-7 if "hard_sigmoid" in name and keras.backend.backend() == "torch" else 1e-9
    for key in their_history:
        np.testing.assert_allclose(our_history[key], their_history[key], rtol=rtol, err_msg=key)
    for place, (mine, expected) in enumerate(zip(ours.get_weights(), theirs.get_weights(), strict=True)):
        np.testing.assert_allclose(mine, expected, rtol=10 * rtol, atol=rtol, err_msg=f"weight {place}")
    np.testing.assert_allclose(
        ours.evaluate(x, y, verbose=0), theirs.evaluate(x, y, verbose=0, batch_size=BATCH), rtol=rtol
    )
    np.testing.assert_allclose(ours.predict(x[:7]), theirs.predict(x[:7], verbose=0), rtol=10 * rtol, atol=rtol)


@pytest.mark.parametrize("name", middles(dp))
def test_configurations_are_those_of_keras(keras, name):
    for mine, their_layer in zip(stack(dp, name)[1:], stack(keras, name)[1:], strict=True):
        theirs = json.loads(json.dumps(keras.saving.serialize_keras_object(their_layer)))
        config = without_types(theirs["config"]) | {"dtype": None, "name": None}
        assert layers.serialize(mine)["class_name"] == theirs["class_name"]
        written = without_types(mine._get_config())
        assert {"dtype": None, **written} == _rounded(config, written)
        # Both ways: theirs is read here, ours there.
        restored = layers.deserialize(theirs)
        assert without_types(restored._get_config()) | {"name": None} == written
        read = keras.saving.deserialize_keras_object(layers.serialize(restored))
        assert type(read) is type(their_layer)
        assert read.get_config()["name"] == their_layer.name


def without_types(config):
    """Return a configuration without the policies that Keras writes, also of layers in it; with lists for tuples."""
    if isinstance(config, list | tuple):
        return [without_types(entry) for entry in config]
    if not isinstance(config, dict):
        return config
    return {key: without_types(entry) for key, entry in config.items() if key != "dtype"}


def without_seed(config, class_name=None):
    """Return a configuration without what Keras does not write: the seed of a SimpleRNN, also of layers in it."""
    if not isinstance(config, dict):
        return config
    return {
        key: without_seed(entry, config.get("class_name") if key == "config" else None)
        for key, entry in config.items()
        if (class_name, key) != ("SimpleRNN", "seed")
    }


def _rounded(config, mine):
    """Keras keeps the factor of L1 in float32."""
    for key in ("kernel_regularizer", "bias_regularizer", "beta_regularizer", "gamma_regularizer"):
        if config.get(key) and "l1" in config[key]["config"]:
            np.testing.assert_allclose(config[key]["config"]["l1"], mine[key]["config"]["l1"], rtol=1e-7)
            config[key]["config"]["l1"] = mine[key]["config"]["l1"]
    return config


def test_initializers_and_regularizers_have_keras_names_and_defaults(keras):
    for name, cls in initializers.INITIALIZERS.items():
        if name == "constant" or name == "Constant":
            theirs = keras.initializers.Constant()
        else:
            theirs = keras.initializers.get(name)
        config = theirs.get_config()
        assert type(theirs).__name__ == cls.__name__
        if cls is initializers.Identity:
            assert config == {}, "Keras writes the gain now"
        else:
            assert cls()._get_config() == config
        described = initializers.serialize(cls())
        assert type(keras.saving.deserialize_keras_object(described)) is type(theirs)
    for name, cls in regularizers.REGULARIZERS.items():
        theirs = keras.regularizers.get(name)
        assert type(theirs).__name__ == cls.__name__
        assert cls()._get_config() == pytest.approx(theirs.get_config())


def test_an_input_layer_is_read_both_ways(keras):
    mine = layers.InputLayer((4, 5), name="here")
    theirs = keras.layers.InputLayer(shape=(4, 5), name="here")
    assert layers.deserialize(keras.saving.serialize_keras_object(theirs))._sample_shape == (4, 5)
    assert keras.saving.deserialize_keras_object(layers.serialize(mine)).batch_shape == (None, 4, 5)
    assert keras.Sequential([keras.Input((4, 5))]).layers == []
    assert len(dp.Sequential([mine, layers.Flatten()]).layers) == 1


# What Keras on PyTorch computes otherwise than on JAX and TensorFlow, or not at all.
NOT_ON_TORCH = {
    ("AveragePooling2D", 1): "Keras on PyTorch pads with copies of the edge, else it averages what is there",
    ("LayerNormalization", 2): "Keras on PyTorch takes the axis for the last",
}
NOT_ON_JAX = {("MultiHeadAttention", 1): "Keras on JAX refuses values of another width than keys"}
# What Keras 3.15 computes otherwise than its pages say, on PyTorch and JAX alike.
NOT_AS_DOCUMENTED = {
    ("AutoContrast", 1): "Keras takes an image's first axes for height and width, also with channels first",
    ("RandomCrop", 0): "Keras leaves pictures whole where there is no training",
    ("RandomCrop", 1): "Keras leaves pictures whole where there is no training",
}
UNREAD = {
    "InputLayer": "has a test of its own",
    "IntegerLookup": "Keras' needs TensorFlow",
}
READ = [case for case in ALL_CASES if case[0] not in UNREAD]
# Arguments that Keras does not write.
FORGOTTEN = {"RandomGrayscale": {"seed": 3}, "MaxNumBoundingBoxes": {"fill_value": 0}}
# Arguments that Keras writes in another form; of this one it reads none below 0.
OTHERWISE = {
    ("RandomShear", 0): {"x_factor": [-0.3, 0.3], "y_factor": [-0.2, 0.2]},
    ("RandomShear", 1): {"y_factor": [-0.4, 0.4]},
}


def read_by(keras, ours):
    """Return what Keras makes of a layer's configuration."""
    if keras.saving.get_registered_object("cases>shifted") is None:
        keras.saving.register_keras_serializable("cases")(shifted)
    return keras.saving.deserialize_keras_object(json.loads(json.dumps(layers.serialize(ours))))


# What Keras computes in float32 whatever comes in; on JAX the softmax of attention. Ours is 4e-16 from NumPy's.
IN_FLOAT32 = ("ContrastLimitedAdaptiveHistogramEqualization",)
IN_FLOAT32_ON_JAX = ("MultiHeadAttention", "GroupQueryAttention")


def in_float64(theirs):
    """Let Keras' MelSpectrogram make its matrix in float64, which is float32 by default."""
    if type(theirs).__name__ == "MelSpectrogram":
        theirs.linear_to_mel_weight_matrix = functools.partial(theirs.linear_to_mel_weight_matrix, dtype="float64")
    return theirs


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`:UserWarning")
@pytest.mark.parametrize(("name", "number"), READ)
def test_configurations_of_every_layer(keras, name, number):
    """Written and read by both; tests/e2e/test_keras_on_jax.py runs this wherever Keras and JAX are installed."""
    ours = CASES[name][number].make()
    theirs = read_by(keras, ours)
    described = json.loads(json.dumps(keras.saving.serialize_keras_object(theirs)))
    expected = without_types(ours._get_config()) | {"name": theirs.name}
    config = FORGOTTEN.get(name, {}) | without_types(described["config"])
    assert without_seed(config, name) == without_seed(expected | OTHERWISE.get((name, number), {}), name)
    restored = without_types(layers.deserialize(described)._get_config()) | FORGOTTEN.get(name, {})
    assert without_seed(restored, name) == without_seed(expected, name)


@pytest.mark.filterwarnings("ignore:You passed `rms_scaling=True`:UserWarning")
@pytest.mark.parametrize(("name", "number"), READ)
@pytest.mark.parametrize("training", [False, True])
def test_outputs_of_every_layer(keras, name, number, training):
    reason = NOT_AS_DOCUMENTED.get((name, number))
    if keras.backend.backend() == "torch":
        reason = NOT_ON_TORCH.get((name, number), reason)
    if keras.backend.backend() == "jax":
        reason = NOT_ON_JAX.get((name, number), reason)
    if reason is not None:
        pytest.skip(reason)
    case = CASES[name][number]
    ours, inputs = case.make(), case.inputs()
    ours._set_dtype("float64")
    theirs = in_float64(read_by(keras, ours))
    case.call(ours, inputs)
    if training and len(ours.variables) > len(ours.weights):
        return  # states of random numbers: test_augmentation.py compares what is made of the same ones
    their_inputs = [keras.ops.convert_to_tensor(array) for array in inputs]
    case.call(theirs, their_inputs)
    theirs.set_weights(ours.get_weights())
    ours.set_weights(theirs.get_weights())  # LoRA's factors are float32 in Keras
    is_rounded = name in IN_FLOAT32 or (keras.backend.backend() == "jax" and name in IN_FLOAT32_ON_JAX)
    tolerances = {"rtol": 1e-6, "atol": 1e-6} if is_rounded else {"rtol": 1e-12, "atol": 1e-13}
    for _ in range(2):
        mine, reference = case.call(ours, inputs, training), case.call(theirs, their_inputs, training)
        np.testing.assert_allclose(mine, keras.ops.convert_to_numpy(reference), **tolerances)
    for mine, reference in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, reference, rtol=1e-12, atol=1e-13)
    assert float(sum(ours.losses)) == pytest.approx(
        float(sum(keras.ops.convert_to_numpy(loss) for loss in theirs.losses)), rel=1e-6
    )


@pytest.mark.parametrize("options", [{}, {"axis": None}, {"axis": 1}, {"axis": (1, 2)}, {"invert": True}], ids=str)
def test_normalization_adapts_as_keras_does(keras, options):
    x = np.random.default_rng(8).normal(3, 9, (50, 4, 3)).astype(np.float32)
    ours, theirs = layers.Normalization(**options), keras.layers.Normalization(**options)
    ours.adapt(x)
    theirs.adapt(x)
    for weight, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-5)
    np.testing.assert_allclose(ours(x).numpy(), np.asarray(theirs(x)), rtol=1e-5, atol=1e-5)
