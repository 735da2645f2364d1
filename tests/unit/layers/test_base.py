"""What all layers share: building, weights, sublayers, names, seeds, penalties, training, symbolic calls."""

import inspect

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops, random, regularizers
from dptrain.errors import ConfigError
from dptrain.layers import Dense, Input, InputSpec, Layer
from dptrain.program.tensor import Variable, tracing
from dptrain.random import Purpose


class Block(Layer):
    """Two dense layers in a list, a weight of its own and a variable, a penalty by hand."""

    def __init__(self, units=3, **options):
        super().__init__(**options)
        self.units = units
        self.steps = [Dense(units, "tanh"), Dense(units, kernel_regularizer="l2")]
        self.by_name = {"last": Dense(2)}
        self.calls = Variable(np.array(0, np.int64), "calls", trainable=False)
        self.seen = []

    def build(self, input_shape):
        self.seen.append(input_shape)
        self.scale = self.add_weight((input_shape[-1],), "ones", name="scale")

    def call(self, x, training=None):
        self.seen.append(training)
        self.calls.assign_add(1)
        x = x * self.scale
        for step in self.steps:
            x = step(x)
        self.add_loss(ops.sum(x))
        return self.by_name["last"](x)


def paths(weights):
    return [weight._path for weight in weights]


OWN = ["scale", "calls"]
NAMED = [*OWN, *(f"{layer}/{variable}" for layer in ("dense", "dense_1", "dense_2") for variable in ("kernel", "bias"))]


def test_a_layer_is_built_by_its_first_call():
    block = Block()
    assert not block.built
    assert (block.weights, block.losses) == ([block.calls], [])
    with pytest.raises(ConfigError, match=r"count_params` on layer 'block', but the layer isn't built"):
        block.count_params()
    output = block(np.ones((4, 5)))
    assert block.built
    assert all(layer.built for layer in block._flatten_layers())
    assert output.dtype == np.float32
    assert (block.seen[0], int(block.calls)) == ((None, 5), 1)
    block._adopt(seed=2)
    assert paths(block.weights) == NAMED
    assert [layer.name for layer in block._flatten_layers()] == ["block", "dense", "dense_1", "dense_2"]
    assert paths(block.trainable_weights) == [name for name in NAMED if name != "calls"]
    assert paths(block.non_trainable_weights) == ["calls"]
    assert paths(block.trainable_variables) == paths(block.trainable_weights)
    assert block.count_params() == 5 + 1 + 18 + 12 + 8
    assert repr(block.steps[0]) == "<Dense name=dense, built=True>"
    # What was drawn outside a model stays.
    assert block.steps[0].kernel.numpy().tobytes() != Dense(3).kernel_initializer((5, 3), 2, 2).tobytes()


def test_build_by_hand_builds_once():
    class Own(Layer):
        def build(self, input_shape):
            self.w = self.add_weight((input_shape[-1], 2))

        def call(self, x):
            return ops.matmul(x, self.w)

    layer = Own()
    layer.build((None, 3))
    assert layer.built
    assert layer(np.ones((2, 3))).shape == (2, 2)
    assert len(layer.weights) == 1
    assert layer.weights[0].name == "variable"


def test_trainable_reaches_sublayers_and_weights():
    block = Block()
    block(np.ones((4, 5)))
    block.steps[1].trainable = False
    assert len(block.trainable_weights) == 5
    block.trainable = False
    assert block.trainable_weights == []
    assert len(block.non_trainable_weights) == 8
    assert not any(weight.trainable for weight in block.weights)
    assert block.losses[1:] == []
    block.trainable = True
    assert len(block.trainable_weights) == 7
    assert not block.calls.trainable
    frozen = Dense(2, trainable=False)
    frozen(np.ones((1, 2)))
    assert frozen.trainable_weights == []
    assert paths(frozen.weights) == ["kernel", "bias"]
    frozen.trainable = True
    assert paths(frozen.trainable_weights) == ["kernel", "bias"]


def test_losses_are_those_of_the_last_call():
    block = Block()
    for _ in range(2):
        block(np.ones((4, 5)))
        added, penalty = block.losses
        kernel = block.steps[1].kernel.numpy()
        assert float(penalty) == pytest.approx(0.01 * (kernel**2).sum(), rel=1e-6)
        assert added.shape == ()
    block(Input((5,)))
    assert len(block.losses) == 1
    active = Dense(2, activity_regularizer=regularizers.L1(0.5))
    y = active(np.ones((3, 2)))
    assert float(active.losses[0]) == pytest.approx(0.5 * np.abs(y.numpy()).sum() / 3, rel=1e-6)
    assert active.get_config()["activity_regularizer"]["class_name"] == "L1"


def test_training_is_that_of_the_outer_call():
    phases = []

    class Inner(Layer):
        def call(self, x, training=None):
            phases.append(training)
            return x

    class Outer(Layer):
        def __init__(self):
            super().__init__()
            self.inner = Inner()

        def call(self, x):
            return self.inner(self.inner(x), training=False)

    outer = Outer()
    outer(np.ones(2), training=True)
    outer(np.ones(2))
    outer.inner(np.ones(2), training=True)
    assert phases == [True, False, False, False, True]


def test_arguments_by_position_and_by_name():
    class Attention(Layer):
        def build(self, query_shape, value_shape):
            self.shapes = query_shape, value_shape

        def call(self, query, value, scale=1.0, mask=None):
            return ops.matmul(query, ops.transpose(value)) * scale

    layer = Attention()
    assert layer(np.ones((2, 3)), value=np.ones((4, 3)), scale=2.0).numpy().tolist() == [[6.0] * 4] * 2
    assert layer.shapes == ((None, 3), (None, 3))
    with pytest.raises(TypeError, match="missing a required argument: 'value'"):
        layer(np.ones((2, 3)))
    symbolic = layer(Input((3,)), np.ones((4, 3)), scale=3.0)
    assert symbolic.history.keywords == {"scale": 3.0}
    assert len(symbolic.history.inputs) == 1


def test_nested_inputs_and_outputs():
    class Nested(Layer):
        def build(self, input_shape):
            self.shapes = input_shape

        def call(self, inputs):
            return {"sum": inputs["a"] + inputs["b"][0], "first": inputs["a"]}

    layer = Nested()
    output = layer({"a": np.ones((2, 3)), "b": [np.ones((2, 3), np.float32)]})
    assert layer.shapes == {"a": (None, 3), "b": [(None, 3)]}
    assert output["sum"].numpy().tolist() == [[2.0] * 3] * 2
    output = layer({"a": Input((3,)), "b": [Input((3,))]})
    assert output["sum"].history is output["first"].history
    assert layer.output is output
    with pytest.raises(AttributeError, match="has never been called and thus has no defined output"):
        Nested().output  # noqa: B018


def test_floating_inputs_take_the_layers_type():
    layer = Dense(2)
    assert layer([[1, 2.5], [3, 4]]).dtype == np.float32
    assert layer(np.ones((1, 2), np.float64)).dtype == np.float32
    assert layer(np.ones((1, 2), np.uint8)).dtype == np.float32
    assert layer(np.ones((1, 2), np.int64)).dtype == np.float32
    assert layer(ops.ones((1, 2), "float64")).dtype == np.float32
    assert Dense(2, dtype="float64")(np.ones((1, 2), np.float32)).dtype == np.float64
    assert Dense(2, dtype="float64").get_config()["dtype"] == "float64"

    class Seen(Layer):
        def call(self, x):
            return x

    assert Seen()(np.ones(2, np.int16)).dtype == np.int16
    assert Seen(autocast=False)(ops.ones(2 * (1,), "float64")).dtype == np.float64


def test_set_dtype_draws_initial_values_again_and_converts_others():
    block = Block()
    block(Input((5,)))
    block._adopt(4)
    block.steps[1].kernel.assign(np.full((3, 3), 0.1, np.float32))
    block._set_dtype("float64")
    assert {weight.dtype.name for weight in block.weights} == {"float64", "int64"}
    assert block.dtype == block.steps[0].compute_dtype == "float64"
    kernel = block.steps[0].kernel
    assert kernel.numpy().tobytes() == kernel.initializer((5, 3), 4, 2).tobytes()
    assert block.steps[1].kernel.numpy()[0, 0] == np.float32(0.1)
    assert block(np.ones((4, 5))).dtype == np.float64


def test_adoption_names_layers_and_draws_provisional_weights_once():
    model = Block()
    model.steps.append(Dense(3, name="mine"))
    model.steps.append(layers.Dropout(0.5))
    model.steps.append(layers.Dropout(0.5, seed=9))
    model(Input((5,)))
    model._adopt(7)
    assert [sublayer.name for sublayer in model._sublayers] == [
        "dense",
        "dense_1",
        "mine",
        "dropout",
        "dropout_1",
        "dense_2",
    ]
    generators = [step.seed_generator for step in model.steps[3:]]
    assert [
        (generator.seed, generator.number, generator.purpose, generator.count._path) for generator in generators
    ] == [
        (7, 0, Purpose.DROPOUT, "dropout/seed_generator"),
        (9, 1, Purpose.DROPOUT, "dropout_1/seed_generator"),
    ]
    assert set(paths(model.variables)) - set(paths(model.weights)) == {
        generator.count._path for generator in generators
    }
    first = model.get_weights()
    model._adopt(8)
    assert [generator.seed for generator in generators] == [8, 9]
    assert all(np.array_equal(a, b) for a, b in zip(first, model.get_weights(), strict=True))
    other = Block()
    other.steps[:] = model.steps[:]
    model.steps[2].name = "dense"
    with pytest.raises(ConfigError, match="layer names must be unique, found 'dense' 2 times"):
        model._adopt(7)


def test_layers_outside_a_model_differ_and_follow_the_seed():
    def draw():
        dp.utils.set_random_seed(5)
        first, other = Dense(3), Dense(3)
        return [layer(np.ones((1, 4))).numpy().tobytes() for layer in (first, other)]

    try:
        first = draw()
        assert first[0] != first[1]
        assert draw() == first
    finally:
        dp.utils.set_random_seed(0)


def test_weights_come_and_go():
    first, other = Dense(3), Dense(3)
    first(np.ones((1, 4)))
    other(np.ones((1, 4)))
    other.set_weights(first.get_weights())
    assert np.array_equal(first(np.ones((1, 4))), other(np.ones((1, 4))))
    with pytest.raises(ConfigError, match=r"Layer dense weight shape \(4, 3\) is not compatible with .* \(3, 4\)\."):
        first.set_weights([np.ones((3, 4)), np.ones(3)])


def test_initializers_and_regularizers_of_ones_own():
    class Ramp(dp.initializers.Initializer):
        def __call__(self, shape, dtype=None):
            return np.arange(np.prod(shape)).reshape(shape)

    class Quartic(regularizers.Regularizer):
        def __call__(self, x):
            return ops.sum(ops.square(ops.square(x)))

    def halves(shape, dtype=None):
        return np.full(shape, 0.5, dtype)

    layer = Dense(2, kernel_initializer=Ramp(), bias_initializer=halves, kernel_regularizer=Quartic(), name="d")
    layer(np.ones((1, 2)))
    assert layer.kernel.numpy().tolist() == [[0, 1], [2, 3]]
    assert layer.bias.numpy().tolist() == [0.5, 0.5]
    assert float(layer.losses[0]) == 1 + 16 + 81
    assert layer.get_config()["bias_initializer"]["config"] == "halves"
    layer = Dense(2, kernel_regularizer=lambda w: ops.sum(w))
    layer(np.ones((1, 2)))
    assert float(layer.losses[0]) == pytest.approx(layer.kernel.numpy().sum())


def test_configurations_of_ones_own_layers():
    class Named(Layer):
        def __init__(self, units, act="relu", **options):
            super().__init__(**options)
            self.units, self.act = units, dp.activations.get(act)

    config = Named(3, name="n").get_config()
    assert {**config, "dtype": None} == {"name": "n", "trainable": True, "dtype": None, "units": 3, "act": "relu"}
    assert Named.from_config(Named(3, "gelu").get_config()).act is dp.activations.gelu

    class Hidden(Layer):
        def __init__(self, units, function=None, **options):
            super().__init__(**options)
            self._units, self.function = units, function

    assert Hidden(3).get_config()["units"] == 3
    with pytest.raises(ConfigError, match=r"layer Hidden: argument 'units' is not an attribute of the layer, and JSON"):
        Hidden(object()).get_config()

    class Written(Hidden):
        def get_config(self):
            return super().get_config() | {"units": self._units}

    assert Written(3, function=len).get_config()["units"] == 3


def test_dense_of_more_axes_is_one_of_rows():
    x = np.random.default_rng(0).normal(size=(2, 3, 4))
    layer = Dense(5, "tanh", dtype="float64")
    y = layer(x).numpy()
    kernel, bias = layer.get_weights()
    np.testing.assert_allclose(y, np.tanh(x @ kernel + bias), rtol=1e-12)


def test_mistakes_in_one_line():
    layer = Dense(2)
    with pytest.raises(
        ConfigError, match=r'Input 0 of layer "dense" is incompatible .*expected min_ndim=2, found ndim=1'
    ):
        layer(np.ones(3))
    layer(np.ones((2, 3)))
    with pytest.raises(ConfigError, match=r"expected axis -1 of input shape to have value 3, but .* shape \(2, 4\)"):
        layer(np.ones((2, 4)))
    with pytest.raises(ConfigError, match=r"expected axis -1 .* received input with shape \(None, 4\)"):
        layer(Input((4,)))

    class Forgot(Layer):
        def __init__(self):
            pass

    with pytest.raises(ConfigError, match="you forgot to call `super"):
        Forgot()(np.ones(3))

    class Empty(Layer):
        pass

    with pytest.raises(NotImplementedError, match=r"Layer Empty does not have a `call` method implemented"):
        Empty()(np.ones(3))
    with pytest.raises(ConfigError, match="unknown constraint 'max'"):
        Empty().add_weight((2,), constraint="max")
    assert layers.Flatten().compute_output_shape((None, None, 3)) == (None, None)


def test_input_specs():
    class Two(Layer):
        def __init__(self, spec):
            super().__init__()
            self.input_spec = spec

        def call(self, inputs):
            return inputs

    with pytest.raises(ConfigError, match=r'Layer "two" expects 2 input\(s\), but it received 1 input tensors'):
        Two([InputSpec(), InputSpec()])(np.ones(2))
    with pytest.raises(ConfigError, match="expected max_ndim=1, found ndim=2"):
        Two(InputSpec(max_ndim=1))(np.ones((2, 2)))
    with pytest.raises(ConfigError, match=r"expected ndim=3, found ndim=2. Full shape received: \(2, 2\)"):
        Two(InputSpec(shape=(None, 2, 3)))(np.ones((2, 2)))
    Two(InputSpec(shape=(4, None)))(np.ones((2, 2)))
    assert repr(InputSpec(ndim=2, axes={-1: 3})) == "InputSpec(ndim=2, axes={-1: 3})"


def test_a_symbolic_call_changes_nothing():
    block = Block()
    block(np.ones((4, 5)))
    before = block.get_weights()
    block(Input((5,)), training=True)
    assert all(np.array_equal(a, b) for a, b in zip(before, block.get_weights(), strict=True))
    with tracing():
        assert block(np.ones((4, 5))).value is None  # weights are what a program reads


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Dense(3, nodes=4), r"Unrecognized keyword arguments passed to Dense: \{'nodes': 4\}"),
        (lambda: Dense(0), "invalid value for `units`, expected a positive integer. Received: units=0"),
        (lambda: Dense(3, kernel_constraint="max_nrm"), "unknown constraint 'max_nrm'; did you mean"),
        (lambda: Dense(3, activity_regularizer="l3"), "unknown regularizer 'l3'"),
        (lambda: Dense(3, quantization_config={}), "not supported: quantization_config"),
        (lambda: Dense(3, dtype="float8"), "not supported: dtype"),
        (lambda: Dense(3, kernel_regularizer="l3"), "unknown regularizer 'l3'"),
        (lambda: Dense(3, activation="rely"), "unknown activation 'rely'; did you mean"),
        (lambda: Dense(3, activation=3), "Could not interpret activation function identifier: 3"),
        (
            lambda: layers.serialize(Dense(3, lambda x: x)),
            "not supported: writing the lambda <function .*<lambda> at .*> to a file; define it by `def`",
        ),
        (lambda: regularizers.L1(-1), "expected a non-negative float. Received: l1=-1"),
        (lambda: regularizers.L2(float("nan")), "Received: l2=nan"),
        (lambda: regularizers.deserialize({"class_name": "L1", "config": {"l2": 1}}), "regularizer L1"),
        (lambda: layers.ReLU(max_value=-6), "max_value of a ReLU layer cannot be a negative value"),
        (lambda: layers.ReLU(threshold=-1.0), "threshold of a ReLU layer cannot be None or a negative value"),
        (lambda: layers.ReLU(negative_slope=-1), "cannot be None or a negative value"),
        (lambda: layers.LeakyReLU(None), "cannot be None or negative value"),
        (lambda: layers.Softmax(axis="last"), "must be an integer or a list"),
        (lambda: layers.Dropout(-0.1), "between 0 and 1"),
        (lambda: layers.Dropout(0.5, seed=-1), "`seed` argument should be an integer"),
        (lambda: layers.Dropout(0.5, noise_shape="all"), "`noise_shape`. Expected a tuple or list of integers"),
        (lambda: layers.Dropout(0.5, noise_shape=(1, 0)), "Expected all dimensions to be positive integers or None"),
        (lambda: layers.Dropout(0.5, noise_shape=(1, 1.5)), "Expected all elements to be integers or None"),
        (
            lambda: layers.Dropout(0.5, (1,))(Input((3,)), training=True),
            r"for each axis of \(None, 3\) its length, 1 or None",
        ),
        (
            lambda: layers.Dropout(0.5, (1, 2))(Input((3,)), training=True),
            r"noise_shape = \(1, 2\): expected",
        ),
        (lambda: layers.GaussianNoise(1.5), "`stddev`. Expected a float value between 0 and 1"),
        (lambda: layers.GaussianDropout(1), "rate = 1 of GaussianDropout"),
        (lambda: layers.AlphaDropout(1), "rate = 1 of AlphaDropout"),
        (lambda: layers.SpatialDropout2D(2), "`rate`. Expected a float value between 0 and 1"),
        (lambda: layers.PReLU(shared_axes=2)(Input((3,))), r"expected axes 1 to 1 of inputs of shape \(None, 3\)"),
        (lambda: layers.GroupNormalization(0), "invalid value for argument `groups`"),
        (lambda: layers.GroupNormalization()(Input((3,))), r"groups \(32\) cannot be more than"),
        (
            lambda: layers.GroupNormalization(2)(Input((3,))),
            r"groups \(2\) must be a multiple of",
        ),
        (
            lambda: layers.GroupNormalization(1, 0)(Input((3,))),
            "Axis 0 of input tensor should have",
        ),
        (lambda: layers.UnitNormalization("last"), "expected an int or a list/tuple of ints"),
        (lambda: layers.SpectralNormalization("dense"), "isn't a supported layer type"),
        (lambda: layers.SpectralNormalization(Dense(2), 0), "`power_iterations` should be greater than zero"),
        (lambda: layers.SpectralNormalization(layers.ReLU())(Input((3,))), "ReLU object has no attribute 'kernel'"),
        (lambda: layers.EinsumDense("a,b", 3)(Input((3,))), "Invalid einsum equation 'a,b'"),
        (lambda: layers.EinsumDense("ab,bc->ac", 3)(Input((3, 4))), r"does not match an input of shape \(None, 3, 4\)"),
        (lambda: layers.EinsumDense("ab,bc->ac", (3, 4))(Input((3,))), "expected a length for each letter"),
        (lambda: layers.EinsumDense("abc,cd->abd", (4, 5))(Input((3, 4))), "do not match at shared dimension 'b'"),
        (lambda: layers.EinsumDense("ab,bd->ac", 3)(Input((3,))), "Dimension 'c' was specified in the output 'ac'"),
        (lambda: layers.EinsumDense("ab,bdc->ac", 3)(Input((3,))), "Weight dimension 'd' did not have a match"),
        (lambda: layers.EinsumDense("ab,bc->ac", 3, bias_axes="b")(Input((3,))), "Bias dimension 'b' was requested"),
        (lambda: layers.Rescaling([[0.5, 1]]), "not supported: Rescaling"),
        (lambda: layers.Rescaling("half"), "not supported: Rescaling by 'half'"),
        (lambda: layers.Flatten("NCHW"), "The `data_format` argument must be one of"),
        (lambda: layers.MaxPooling1D(data_format="first"), "The `data_format` argument must be one of"),
        (lambda: layers.Reshape((2, -1, -1)), "at most one unknown dimension"),
        (lambda: layers.Reshape((0, 2)), "positive integers"),
        (lambda: layers.Reshape((4, -1))(Input((6,))), "total size of the samples must be unchanged"),
        (lambda: layers.Permute((1, 3)), "must be consecutive and start from 1"),
        (lambda: layers.ZeroPadding2D((1, 2, 3)), "`padding` should have two elements"),
        (lambda: layers.ZeroPadding3D((1, 2)), "`padding` should have 3 elements"),
        (lambda: layers.ZeroPadding2D("same"), r"`padding` should have two elements. Received: padding=same"),
        (lambda: layers.ZeroPadding2D(1.5), "`padding` should be either an int"),
        (lambda: layers.ZeroPadding2D(((1, 2), (1, -1))), "The `2nd entry of padding` argument must be a tuple of 2"),
        (
            lambda: layers.Cropping1D((1, 2))(Input((3, 1))),
            "should be smaller than the corresponding",
        ),
        (lambda: layers.UpSampling2D(interpolation="cubic"), "`interpolation` argument should be one of"),
        (lambda: layers.Conv2D(2, 2.5), "The `kernel_size` argument must be a tuple of 2 integers"),
        (lambda: layers.UpSampling2D((2, 2, 2)), "The `size` argument must be a tuple of 2 integers"),
        (
            lambda: layers.BatchNormalization(renorm=True, renorm_clipping={"min": 1}),
            "invalid keys",
        ),
        (
            lambda: layers.BatchNormalization(renorm=True, renorm_clipping={"rmin": 2, "rmax": 1}),
            "rmax should be greater than rmin",
        ),
        (lambda: layers.BatchNormalization(renorm=True, renorm_clipping={"dmax": -1}), "dmax should be non-negative"),
        (lambda: layers.BatchNormalization(momentum=2), "0 <= momentum <= 1"),
        (lambda: layers.BatchNormalization(axis=0)(Input((2, 3))), "expected an axis of known length"),
        (lambda: layers.BatchNormalization(axis=1)(Input((None, 3))), "expected an axis of known length"),
        (lambda: layers.LayerNormalization(axis=(0, 2))(Input((2, 3))), "expected axes other than the batch axis"),
        (lambda: layers.Conv2D(3, (2, 0)), "`kernel_size` argument must be a tuple of 2 integers"),
        (lambda: layers.Conv2D(3, 2, padding="full"), "`padding` argument must be"),
        (lambda: layers.Conv2D(4, 2, groups=3), "filters must be evenly divisible by the number of groups"),
        (
            lambda: layers.Conv2D(3, 2, groups=3)(Input((4, 4, 2))),
            "input channels must be evenly divisible",
        ),
        (lambda: layers.Conv2D(3, 2, padding="causal"), "`padding` argument must be"),
        (lambda: layers.DepthwiseConv1D(2, padding="causal"), "`padding` argument must be"),
        (lambda: layers.DepthwiseConv2D(2, depth_multiplier=0), "invalid value for `depth_multiplier`"),
        (lambda: layers.Conv2D(3, 2, 2, dilation_rate=2), "not supported in conjunction with `dilation_rate > 1`"),
        (lambda: layers.Conv2D(3, 5)(Input((4, 4, 1))), "does not fit into a length of 4"),
        (lambda: layers.Conv2D(3, 5)(Input((4, 4))), "expected ndim=4, found ndim=3"),
        (lambda: layers.Conv2DTranspose(3, 2, output_padding=1), "must be strictly less than `strides`"),
        (lambda: layers.Conv2DTranspose(3, 2, 2, dilation_rate=2), "not supported in conjunction with `dilation_rate"),
        (lambda: layers.Add()(Input((3,))), "should be called on a list of inputs"),
        (lambda: layers.Add()([Input((3,)), Input((4,))]), "cannot be broadcast"),
        (lambda: layers.Subtract()([Input((3,))] * 3), "exactly 2 inputs"),
        (lambda: layers.Concatenate()([Input((3, 2)), Input((4, 2))]), "matching shapes except for the concatenation"),
        (lambda: layers.Dot(0), "argument `axes`"),
        (lambda: layers.Dot(1)([Input((3,)), Input((4,))]), r"axis values 3 \(at axis 1\) != 4 \(at axis 1\)"),
        (lambda: dp.Input(), "You must pass a `shape` argument"),
        (lambda: dp.Input((3,), batch_shape=(None, 3)), "at the same time"),
        (lambda: dp.Input((-1, 3)), "positive integers"),
        (lambda: dp.Input(5), "positive integers. Received: shape=5"),
        (lambda: Dense(3, input_shape=5), "positive integers. Received: shape=5"),
        (lambda: Dense(3, input_shape=(0.5,)), r"positive integers. Received: shape=\(0.5,\)"),
        (lambda: Dense(3, input_dim=0), r"positive integers. Received: shape=\(0,\)"),
        (lambda: dp.Input((3,), sparse=True), "not supported: sparse"),
        (lambda: layers.deserialize({"class_name": "Dens", "config": {}}), "did you mean 'Dense'"),
        (lambda: layers.deserialize({"class_name": "Dense", "config": {}}), "layer Dense"),
        (lambda: layers.deserialize("Dense"), "layer Dense: .*missing 1 required positional argument: 'units'"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_the_shape_of_outputs_is_asked_without_building():
    layer = layers.Dense(7)
    assert (layer.compute_output_shape((None, 5)), layer.built, layer.weights) == ((None, 7), False, [])


def test_a_policy_that_is_set_is_the_layers_own():
    layer = layers.Dense(2)
    layer.build((None, 3))
    layer.dtype_policy = "mixed_float16"
    assert (layer.compute_dtype, layer.variable_dtype, layer.dtype_policy.name) == (
        *("float16", "float32"),
        "mixed_float16",
    )
    layer.dtype_policy = "float64"
    assert (layer.kernel.dtype.name, layer.get_config()["dtype"]) == ("float64", "float64")
    with pytest.raises(ConfigError, match="expected a policy or its name"):
        layer.dtype_policy = None


def test_a_list_that_contains_itself_holds_its_layers_once():
    class Looped(layers.Layer):
        def __init__(self):
            super().__init__()
            self.parts = [layers.Dense(2)]
            self.parts.append(self.parts)

        def call(self, x):
            return self.parts[0](x)

    layer = Looped()
    layer(np.ones((1, 3), np.float32))
    assert len(layer.weights) == 2


def test_trainable_is_true_or_false():
    with pytest.raises(ConfigError, match="Expected `trainable` to be a boolean"):
        layers.Dense(2, trainable="yes")


def test_the_slope_of_keras_2():
    assert layers.LeakyReLU(alpha=0.2).negative_slope == 0.2


@pytest.mark.parametrize("padding", ["VALID", "Same"])
def test_paddings_in_capitals(padding):
    x, kernel = np.ones((1, 5, 5, 1), np.float32), np.ones((2, 2, 1, 3), np.float32)
    for call in (
        lambda p: ops.conv(x, kernel, padding=p),
        lambda p: ops.max_pool(x, 2, padding=p),
        lambda p: ops.conv_transpose(x, np.ones((2, 2, 3, 1), np.float32), 1, p),
    ):
        np.testing.assert_array_equal(call(padding).numpy(), call(padding.lower()).numpy())


def test_a_convolution_of_another_kernel():
    class Centered(layers.Conv2D):
        def call(self, inputs):
            return self.convolution_op(inputs, self.kernel - ops.mean(self.kernel))

    layer, x = Centered(2, 3), np.random.default_rng(1).normal(size=(1, 5, 5, 1)).astype(np.float32)
    output = layer(x).numpy()
    kernel = layer.kernel.numpy()
    np.testing.assert_allclose(output, ops.conv(x, kernel - kernel.mean()).numpy(), rtol=1e-5)


def test_a_rate_of_one_leaves_nothing():
    for output in (layers.Dropout(1.0)(np.ones((2, 2)), training=True), random.dropout(np.ones((2, 2)), 1.0)):
        assert not output.numpy().any()


def test_what_outputs_will_be_is_asked_without_building():
    layer = layers.LSTM(3, return_state=True, dtype="mixed_float16")
    specs = layer.compute_output_spec(dp.KerasTensor((None, 4, 5)))
    assert [(spec.shape[1:], spec.dtype.name) for spec in specs] == [((3,), "float16")] * 3
    assert (layer.built, isinstance(specs[0], dp.KerasTensor)) == (False, True)
    model = dp.Sequential([dp.Input((4,)), Dense(2)])
    assert str(model.compute_output_spec(dp.KerasTensor((7, 4))).shape) == "(7, 2)"


@pytest.mark.parametrize(
    "base", [layers.Dropout, layers.Masking, layers.ReLU, layers.GaussianNoise, layers.MaxPooling1D]
)
def test_weights_of_a_subclass_of_a_layer_without_any(base):
    class Scaled(base):
        def build(self, input_shape):
            self.scale = self.add_weight((input_shape[-1],), "ones", name="scale")

        def call(self, inputs):
            return super().call(inputs) * self.scale

    arguments = {layers.Dropout: (0.5,), layers.GaussianNoise: (0.5,)}.get(base, ())
    assert base(*arguments).built
    layer = Scaled(*arguments)
    assert not layer.built
    assert layer(np.ones((2, 4, 3))).shape[-1] == 3
    assert len(layer.weights) == 1


@pytest.mark.parametrize(
    "layer",
    [
        layers.Masking(),
        layers.Embedding(3, 2, mask_zero=True),
        layers.Attention(),
        layers.Concatenate(),
        layers.LSTM(2, return_sequences=True),
        layers.Bidirectional(layers.LSTM(2)),
        layers.GlobalAveragePooling1D(),
    ],
)
def test_a_mask_is_given_by_the_name_that_keras_has(layer):
    assert list(inspect.signature(layer.compute_mask).parameters) == ["inputs", "mask"]


@pytest.mark.parametrize("axis", ["x", {"a": 1}, 1.5, True])
@pytest.mark.parametrize(
    "layer",
    [
        *(layers.LayerNormalization, layers.BatchNormalization, layers.GroupNormalization),
        *(layers.RMSNormalization, layers.UnitNormalization, layers.Concatenate),
    ],
)
def test_axes_are_integers(layer, axis):
    with pytest.raises(TypeError, match="Invalid value for `axis` argument"):
        layer(axis=axis)


def test_a_weight_is_named_by_keyword():
    with pytest.raises(ConfigError, match=r"Use: add_weight\(shape=..., name='w'\)"):
        Layer().add_weight("w", (2,))


def test_arguments_of_build_have_the_names_of_those_of_call():
    class Pair(Layer):
        def build(self, first, two):
            self.built = True

        def call(self, first, two):
            return first + two

    with pytest.raises(ConfigError, match="build\\(\\) takes first, two; call\\(\\) was given first, two"):
        Pair()(np.ones((1, 2)), np.ones((1, 2)))


def test_totals_of_metrics_are_asked_of_a_layer():
    class Measured(Layer):
        def __init__(self):
            super().__init__()
            self.mean = dp.metrics.Mean()

    layer = Measured()
    assert layer.metrics_variables == layer.mean.variables
    assert len(layer.metrics_variables) == 2


def test_an_input_layer_takes_its_shape_by_the_name_of_keras_2():
    assert layers.InputLayer(input_shape=(3, 4)).batch_shape == (None, 3, 4)


@pytest.mark.parametrize("layer", [Dense(3), layers.Cropping1D(1), layers.Conv1D(3, 2), layers.LSTM(2)])
def test_a_fixed_batch_size_stays_beside_a_length_that_is_not_known(layer):
    assert layer(Input(batch_shape=(4, None, 7))).shape[0] == 4
    assert str(layer(Input(batch_shape=(None, None, 7))).shape).startswith("(None, ")


@pytest.mark.parametrize(
    ("shapes", "expected"),
    [
        (lambda shape: shape, (None, 3)),
        (lambda shape: (shape, (*shape, 2)), ((None, 3), (None, 3, 2))),
        (lambda shape: [shape, shape], [(None, 3), (None, 3)]),
        (lambda shape: {"a": shape, "b": [(4,)]}, {"a": (None, 3), "b": [(4,)]}),
    ],
)
def test_output_specs_are_those_of_a_users_output_shape(shapes, expected):
    class Unable(layers.Layer):
        def call(self, x):
            raise RuntimeError("is not called")

        def compute_output_shape(self, input_shape):
            return shapes(input_shape)

    spec = Unable(dtype="float64").compute_output_spec(dp.KerasTensor((None, 3)))
    assert dp.tree.map_structure(lambda tensor: tuple(tensor.shape), spec) == expected
    assert {tensor.dtype.name for tensor in dp.tree.flatten(spec)} == {"float64"}
    of_two = Unable().compute_output_spec(dp.KerasTensor((2, 3)))
    rows = [tensor.shape[0] for tensor in dp.tree.flatten(spec)]
    assert [tensor.shape[0] for tensor in dp.tree.flatten(of_two)] == [2 if n is None else n for n in rows]
    with pytest.raises(NotImplementedError, match="Layer Layer does not have a `call` method implemented"):
        layers.Layer()(np.ones((2, 3)))
