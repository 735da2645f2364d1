"""Masks: they go with tensors from layer to layer, and losses and metrics leave out what they leave out."""

import numpy as np
import pytest

import dptrain as keras
from dptrain import layers as L  # noqa: N812
from dptrain import losses, metrics, ops
from dptrain.errors import ConfigError
from dptrain.program.tensor import mask_of

X = np.array([[1.0, 2.0, 3.0], [4.0, 0.0, -1.0]], np.float32)
STEPS = np.array([[[1, 2], [0, 0], [3, 1]], [[0, 0], [0, 4], [0, 0]]], np.float32)
COUNTS = np.array([[1, 0, 1], [0, 1, 0]], bool)
ENDS = "does not support masking and will therefore destroy the mask information"


def softmax_where(counts, x):
    powers = np.exp(x) * counts
    return powers / np.maximum(powers.sum(-1, keepdims=True), 1e-30)


@pytest.mark.parametrize("eagerly", [False, True])
def test_what_is_below_attention_is_trained_where_steps_are_masked(eagerly):
    """A tensor that gets another mask, or none, has the gradient that it had."""
    inputs = L.Input((5,), dtype="int64")
    embedding = L.Embedding(4, 6, mask_zero=True)
    x = embedding(inputs)
    model = keras.Model(inputs, L.GRU(2)(L.MultiHeadAttention(2, 3)(x, x)))
    model.compile("sgd", "mse", run_eagerly=eagerly)
    before = embedding.get_weights()[0].copy()
    model.train_on_batch(np.arange(20).reshape(4, 5) % 4, np.ones((4, 2)))
    assert (embedding.get_weights()[0][1:] != before[1:]).all()


@pytest.mark.parametrize(
    "mask", [np.array([[1, 0, 1], [0, 0, 0]], bool), np.array([[0.9, 0.2, 0.0], [1.0, 1.0, 0.0]], np.float32)]
)
def test_softmax_of_what_a_mask_leaves(mask):
    np.testing.assert_allclose(L.Softmax()(X, mask=mask), softmax_where(mask > 0.5, X), rtol=1e-6)


def test_a_mask_broadcasts_to_the_input_and_not_the_other_way_round():
    row = np.array([True, True, False])
    np.testing.assert_allclose(L.Softmax()(X, mask=row), softmax_where(row, X), rtol=1e-6)
    for mask in (np.ones((1, 2, 3), bool), np.ones((2, 2), bool)):
        with pytest.raises(ConfigError, match=r"must be broadcastable to `inputs`. Received: inputs.shape=\(2, 3\)"):
            L.Softmax()(X, mask=mask)


def test_softmax_over_several_axes():
    powers = np.exp(X)
    np.testing.assert_allclose(L.Softmax([0, 1])(X), powers / powers.sum(), rtol=1e-6)
    np.testing.assert_allclose(L.Softmax([1])(X), powers / powers.sum(1, keepdims=True), rtol=1e-6)
    assert L.Softmax((0, 1)).get_config()["axis"] == [0, 1]
    with pytest.raises(ConfigError, match="`axis` must be an integer or a list of integers"):
        L.Softmax("last")


def test_a_mask_is_an_input_of_a_functional_model():
    x, mask = keras.Input((3,)), keras.Input((3,), dtype="bool")
    model = keras.Model([x, mask], L.Softmax()(x, mask=mask))
    counts = np.array([[1, 0, 1], [1, 1, 1]], bool)
    np.testing.assert_allclose(model.predict([X, counts], verbose=0), softmax_where(counts, X), rtol=1e-6)


class Halves(L.Layer):
    def call(self, x):
        return x / 2


class Ignores(keras.Model):
    def call(self, x):
        return x


@pytest.mark.parametrize("layer", [L.Dense(2), L.Dropout(0.5), L.Add(), Halves(), Ignores()])
def test_what_takes_no_mask_refuses_one(layer):
    inputs = [X, X] if isinstance(layer, L.Add) else X
    assert layer(inputs, mask=None).shape[0] == 2
    with pytest.raises(ConfigError, match=r"^not supported: a mask for layer '\w+' \(\w+\), which would ignore it$"):
        layer(inputs, mask=np.ones((2, 3), bool))


def test_a_layer_of_ones_own_gets_the_mask_that_it_takes():
    class Masked(L.Layer):
        def call(self, x, mask=None):
            return x if mask is None else x * ops.expand_dims(ops.cast(mask, x.dtype), 1)

    with pytest.warns(UserWarning, match=ENDS):
        np.testing.assert_array_equal(Masked()(X, mask=np.array([True, False])), X * [[1], [0]])


# What masks are


def test_masking_zeroes_steps_and_attaches_the_mask():
    layer = L.Masking(4.0)
    inputs = np.where(COUNTS[..., None], STEPS, 4.0)
    outputs = layer(inputs)
    np.testing.assert_array_equal(outputs, STEPS)
    np.testing.assert_array_equal(outputs._keras_mask, COUNTS)
    np.testing.assert_array_equal(layer.compute_mask(inputs), COUNTS)
    assert L.Masking.from_config(layer.get_config()).mask_value == 4.0


def test_embedding_masks_zeros_where_it_is_told_to():
    ids = np.array([[2, 1, 0]])
    np.testing.assert_array_equal(L.Embedding(3, 2, mask_zero=True)(ids)._keras_mask, [[True, True, False]])
    plain = L.Embedding(3, 2)
    assert mask_of(plain(ids)) is None
    assert plain.compute_mask(ids) is None
    assert not plain.supports_masking


# fmt: off
SUPPORTING = [
    "ActivityRegularization", "Add", "AlphaDropout", "Average", "BatchNormalization", "Concatenate", "Dense", "Dot",
    "Dropout", "ELU", "GaussianDropout", "GaussianNoise", "GlobalAveragePooling1D", "GroupNormalization", "Identity",
    "LayerNormalization", "LeakyReLU", "Masking", "Maximum", "Minimum", "Multiply", "Normalization", "PReLU", "ReLU",
    "Rescaling", "Softmax", "SpatialDropout1D", "Subtract", "UnitNormalization",
]
# fmt: on


class Passes(L.Layer):
    def call(self, x):
        return 2 * x

    def compute_mask(self, inputs, previous_mask=None):
        return previous_mask


def test_which_layers_support_masking():
    arguments = {"Dense": [1], "Dot": [1], "Rescaling": [1.0]}
    for name in SUPPORTING:
        rate = [0.5] if "Dropout" in name or "Noise" in name else []
        assert getattr(L, name)(*arguments.get(name, rate)).supports_masking, name
    for layer in (L.Flatten(), L.Conv1D(1, 1), L.Reshape((1,)), L.MaxPooling1D(), L.RMSNormalization(), Halves()):
        assert not layer.supports_masking
    assert Passes().supports_masking


# Where they go


@pytest.mark.parametrize(
    "between", [L.Dense(3), L.Dropout(0.5), L.BatchNormalization(), L.LayerNormalization(), L.Activation("relu")]
)
def test_a_mask_goes_through_layers_that_support_it(between):
    np.testing.assert_array_equal(mask_of(between(L.Masking()(STEPS))), COUNTS)


def test_a_mask_is_the_argument_of_layers_that_take_one():
    class Sees(L.Layer):
        def call(self, x, mask=None):
            self.seen = mask
            return x

        def compute_mask(self, inputs, previous_mask=None):
            return None

    sees = Sees()
    sees(L.Masking()(STEPS))
    np.testing.assert_array_equal(sees.seen, COUNTS)
    sees(STEPS)
    assert sees.seen is None


def test_several_tensors_have_masks_under_their_names():
    class Both(L.Layer):
        def call(self, query, value, query_mask=None, value_mask=None):
            self.seen = query_mask, value_mask
            return query

    layer = Both()
    with pytest.warns(UserWarning, match=ENDS):
        layer(L.Masking()(STEPS), STEPS)
    np.testing.assert_array_equal(layer.seen[0], COUNTS)
    assert layer.seen[1] is None


def test_a_layer_without_support_warns_and_drops_the_mask():
    with pytest.warns(UserWarning, match=rf"^Layer 'flatten' \(of type Flatten\) was passed an input .* {ENDS}"):
        assert mask_of(L.Flatten()(L.Masking()(STEPS))) is None


def test_symbolic_tensors_have_symbolic_masks():
    inputs = keras.Input((3, 2))
    hidden = L.Dense(2)(L.Masking()(inputs))
    assert hidden._keras_mask.shape[1:] == (3,)
    assert keras.backend.is_keras_tensor(hidden._keras_mask)
    model = keras.Model(inputs, [hidden, hidden._keras_mask])
    np.testing.assert_array_equal(model(STEPS)[1], COUNTS)
    np.testing.assert_array_equal(mask_of(model(STEPS)[0]), COUNTS)


@pytest.mark.parametrize("options", [True, False])
def test_models_hand_masks_to_their_layers(options):
    layers = [L.Dense(2), L.GlobalAveragePooling1D()]
    model = keras.Sequential([*([L.Input((None, 2))] if options else []), *layers])
    for inputs, more in ((L.Masking()(STEPS), {}), (STEPS, {"mask": COUNTS})):
        with pytest.warns(UserWarning, match=ENDS):  # as in Keras, though they reach the layers
            output = model(inputs, **more)
        rows = np.array([STEPS[0, [0, 2]].mean(0), STEPS[1, 1]])
        np.testing.assert_allclose(output, layers[0](rows), rtol=1e-5)


def test_a_nested_model_and_its_file(tmp_path):
    inputs = keras.Input((3,), dtype="int32")
    inner_inputs = keras.Input((None, 2))
    inner = keras.Model(inner_inputs, L.Dense(2, name="inside")(inner_inputs))
    with pytest.warns(UserWarning, match=ENDS):
        outputs = L.GlobalAveragePooling1D()(inner(L.Embedding(5, 2, mask_zero=True)(inputs)))
    model = keras.Model(inputs, outputs)
    ids = np.array([[1, 2, 0], [0, 3, 0]])
    rows = np.array([model.layers[1].get_weights()[0][[1, 2]].mean(0), model.layers[1].get_weights()[0][3]])
    with pytest.warns(UserWarning, match=ENDS):
        output = model(ids)
    np.testing.assert_allclose(output, inner(rows[:, None])[:, 0], rtol=1e-5)
    model.save(tmp_path / "m.keras")
    with pytest.warns(UserWarning, match=ENDS):
        np.testing.assert_array_equal(keras.models.load_model(tmp_path / "m.keras")(ids), output)


def test_a_subclassed_model_hands_masks_on():
    class Mine(keras.Model):
        def __init__(self):
            super().__init__()
            self.embed, self.pool = L.Embedding(5, 2, mask_zero=True), L.GlobalAveragePooling1D()

        def call(self, x):
            return self.pool(self.embed(x))

    mine, ids = Mine(), np.array([[1, 2, 0], [0, 3, 0]])
    table = mine(ids) is not None and mine.embed.get_weights()[0]
    np.testing.assert_allclose(mine.predict(ids, verbose=0), [table[[1, 2]].mean(0), table[3]], rtol=1e-6)


@pytest.mark.filterwarnings("error")
def test_a_compiled_step_computes_masks_of_each_batch():
    model = keras.Sequential([L.Input((None, 2)), L.Masking(), L.GlobalAveragePooling1D()])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(7, 5, 2)).astype(np.float32) * (rng.random((7, 5, 1)) < 0.6)
    x[:, 0] = 1.0
    counts = x.any(-1)
    np.testing.assert_allclose(
        model.predict(x, batch_size=3, verbose=0), x.sum(1) / counts.sum(1, keepdims=True), rtol=1e-5
    )


# Where several masks meet


def test_sums_count_where_any_summand_does():
    other = np.array([[[0, 0], [1, 1], [3, 1]], [[0, 0], [0, 4], [0, 0]]], np.float32)
    masked, others = L.Masking()(STEPS), L.Masking()(other)
    for layer in (L.Add(), L.Average(), L.Subtract()):
        np.testing.assert_array_equal(mask_of(layer([masked, others])), COUNTS | other.any(-1))
        assert mask_of(layer([masked, other])) is None
    with pytest.raises(ConfigError, match="should have the same length"):
        L.Add().compute_mask([masked, others], [COUNTS])
    with pytest.raises(ConfigError, match="`mask` should be a list"):
        L.Add().compute_mask([masked, others], COUNTS)


def test_products_and_extremes_leave_masked_factors_out():
    other = np.array([[[5, 5], [1, 1], [0, 0]], [[0, 0], [2, 2], [0, 0]]], np.float32)
    masked, others = L.Masking()(STEPS), L.Masking()(other)
    product = L.Multiply()([masked, others])
    np.testing.assert_array_equal(product, [[[5, 10], [1, 1], [3, 1]], [[0, 0], [0, 8], [0, 0]]])
    np.testing.assert_array_equal(mask_of(product), COUNTS | other.any(-1))
    np.testing.assert_array_equal(L.Multiply()([masked, other]), np.where(COUNTS[..., None], STEPS, 1) * other)
    least = L.Minimum()([masked, others])
    np.testing.assert_array_equal(least, [[[1, 2], [1, 1], [3, 1]], [[0, 0], [0, 2], [0, 0]]])
    np.testing.assert_array_equal(mask_of(least), COUNTS | other.any(-1))
    assert mask_of(L.Maximum()([masked, other])) is None


def test_concatenated_masks():
    masked = L.Masking()(STEPS)
    np.testing.assert_array_equal(mask_of(L.Concatenate(axis=1)([masked, STEPS])), np.c_[COUNTS, np.ones((2, 3), bool)])
    np.testing.assert_array_equal(mask_of(L.Concatenate()([masked, masked])), COUNTS)
    np.testing.assert_array_equal(mask_of(L.Concatenate()([masked, STEPS])), np.ones((2, 3), bool))
    assert mask_of(L.Dot(1)([masked, masked])) is None


def test_a_lambda_has_the_mask_that_it_is_given():
    masked = L.Masking()(STEPS)
    doubled = L.Lambda(lambda x: 2 * x, mask=lambda x, mask: ops.logical_not(mask))
    np.testing.assert_array_equal(mask_of(doubled(masked)), ~COUNTS)
    fixed = L.Lambda(lambda x: 2 * x, mask=COUNTS)
    np.testing.assert_array_equal(mask_of(fixed(STEPS)), COUNTS)
    with pytest.warns(UserWarning, match=ENDS):
        L.Lambda(lambda x, mask: np.testing.assert_array_equal(mask, COUNTS) or x)(masked)


def test_batch_normalization_leaves_masked_steps_out_of_its_statistics():
    layer = L.BatchNormalization(momentum=0.0, epsilon=0.0)
    outputs = layer(L.Masking()(STEPS), training=True).numpy()
    counted = STEPS[COUNTS]
    np.testing.assert_allclose(layer.moving_mean, counted.mean(0), rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance, counted.var(0), rtol=1e-5)
    np.testing.assert_allclose(outputs[COUNTS], (counted - counted.mean(0)) / counted.std(0), rtol=1e-4)
    with pytest.raises(ConfigError, match="should be one dimension less than the inputs"):
        layer(STEPS, mask=np.ones(2, bool))


# Losses and metrics


def weighted(reduction, errors, counts, weights):
    total = (errors * counts * weights).sum()
    if reduction == "none":
        return errors * counts * weights
    divisor = {"sum_over_batch_size": counts.sum(), "sum": 1, "mean_with_sample_weight": (counts * weights).sum()}
    return total / divisor[reduction]


@pytest.mark.parametrize("reduction", ["sum_over_batch_size", "sum", "mean_with_sample_weight", "none"])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0], [[1.0, 2.0, 0.5], [3.0, 1.0, 1.0]]])
def test_a_loss_divides_by_what_counts(reduction, weights):
    predicted, targets = L.Masking()(STEPS), np.ones((2, 3, 2), np.float32)
    full_weights = np.ones((2, 3)) if weights is None else np.reshape(weights, (2, -1)) * np.ones((2, 3))
    errors = np.square(predicted.numpy() - 1).mean(-1)
    value = losses.MeanSquaredError(reduction)(targets, predicted, weights)
    np.testing.assert_allclose(value, weighted(reduction, errors, COUNTS, full_weights), rtol=1e-6)


def test_a_mask_and_ignored_labels_count_together():
    logits = L.Masking()(STEPS)
    labels = np.array([[0, 1, -1], [0, 1, 0]])
    value = losses.SparseCategoricalCrossentropy(from_logits=True, ignore_class=-1)(labels, logits)
    counted = STEPS[[0, 1], [0, 1]]
    expected = np.log(np.exp(counted).sum(-1)) - counted[[0, 1], [0, 1]]
    np.testing.assert_allclose(value, expected.mean(), rtol=1e-5)


def test_nothing_that_counts_is_no_loss():
    assert float(losses.MeanSquaredError()(np.ones((2, 3, 2)), L.Masking()(np.zeros((2, 3, 2), np.float32)))) == 0.0


def test_metrics_leave_masked_steps_out():
    predicted, targets = L.Masking()(STEPS), np.ones((2, 3, 2), np.float32)
    errors = np.abs(predicted.numpy() - 1).mean(-1)
    for weights, full_weights in ((None, np.ones((2, 3))), ([1.0, 3.0], np.array([[1.0], [3.0]]))):
        metric = metrics.MeanAbsoluteError()
        metric.update_state(targets, predicted, weights)
        np.testing.assert_allclose(
            metric.result(), (errors * COUNTS * full_weights).sum() / (COUNTS * full_weights).sum(), rtol=1e-6
        )


@pytest.mark.parametrize("eager", [True, False])
def test_fit_and_evaluate_leave_masked_steps_out(eager):
    model = keras.Sequential([L.Input((3, 2)), L.Masking(), L.Dense(1, kernel_initializer="ones")])
    model.compile(keras.optimizers.SGD(0.5), "mse", metrics=["mae"], run_eagerly=eager)
    targets = np.zeros((2, 3, 1), np.float32)
    sums = STEPS.sum(-1)[COUNTS]
    results = model.evaluate(STEPS, targets, verbose=0)
    np.testing.assert_allclose(results, [np.square(sums).mean(), sums.mean()], rtol=1e-6)
    model.fit(STEPS, targets, epochs=1, verbose=0)
    gradient = (2 * sums[:, None] * STEPS[COUNTS]).mean(0)
    np.testing.assert_allclose(model.get_weights()[0][:, 0], 1 - 0.5 * gradient, rtol=1e-5)
