"""Small conveniences of Keras' classes and functions: what each returns, and what it refuses, as Keras does."""

import warnings

import keras
import numpy as np
import pytest

import dptrain as dp

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' tensors

X = np.random.default_rng(0).normal(size=(6, 2)).astype(np.float32)


def value(x):
    return x.detach().numpy() if hasattr(x, "detach") else np.asarray(x)


def one_space(k):
    features = {"a": k.utils.FeatureSpace.float_discretized(num_bins=5, output_mode="one_hot")}
    space = k.utils.FeatureSpace(features, output_mode="concat")
    space.adapt({"a": np.array([1.0, 2.0])})
    return value(space({"a": np.array([0.5, 1.5, 3.0])}))


def test_few_rows_have_as_many_bins_as_asked():
    """Keras' FeatureSpace needs TensorFlow: its width is `num_bins`, whatever `adapt` has found."""
    encoded = one_space(dp)
    assert encoded.shape == (3, 5)
    np.testing.assert_array_equal(encoded.sum(-1), 1)


@pytest.mark.parametrize("mode", ["int", "one_hot", "multi_hot", "count"])
@pytest.mark.parametrize("shape", [(None,), (None, 1), (None, 4), (3, 4, 5), (7,)], ids=str)
def test_bins_have_a_shape_before_they_are_known(mode, shape):
    for arguments in ({"num_bins": 3}, {"bin_boundaries": [1.0, 2.0]}):
        shapes = [
            k.layers.Discretization(**arguments, output_mode=mode).compute_output_shape(shape) for k in (dp, keras)
        ]
        assert shapes[0] == shapes[1]


def test_round_and_signs_of_variables():
    numbers = np.array([1.26, 2.5, -0.5])
    for function in (round, lambda x: round(x, 1), lambda x: +x):
        results = [function(k.Variable(numbers, dtype="float64")) for k in (dp, keras)]
        np.testing.assert_array_equal(results[0], value(results[1]))


def test_a_tensor_initializes_what_has_its_shape():
    tensor = np.arange(6.0).reshape(2, 3)
    for k in (dp, keras):
        initializer = k.initializers.get(k.ops.convert_to_tensor(tensor))
        np.testing.assert_array_equal(value(initializer((2, 3))), tensor)
        with pytest.raises(ValueError, match="Expected `shape` to be"):
            initializer((3, 2))
    layer = dp.layers.Dense(3, kernel_initializer=dp.ops.convert_to_tensor(tensor), use_bias=False)
    np.testing.assert_array_equal(layer(np.eye(2)), tensor)


def test_a_generators_state_counts_its_draws():
    for k in (dp, keras):
        generator = k.random.SeedGenerator(7)
        states = [value(generator.next()), value(generator.next())]
        np.testing.assert_array_equal(states, [[7, 0], [7, 1]])
        np.testing.assert_array_equal(value(generator.state if k is dp else generator.state.value), [7, 2])
    generators = [dp.random.SeedGenerator(7) for _ in range(2)]
    dp.random.normal((3,), seed=generators[0])
    generators[1].next()
    np.testing.assert_array_equal(*(dp.random.normal((3,), seed=generator) for generator in generators))


def test_another_optimizer_goes_on_with_the_weights():
    logs = []
    for k in (dp, keras):
        model = k.Sequential([k.Input((2,)), k.layers.Dense(1, kernel_initializer="ones")])
        model.compile(k.optimizers.SGD(0.1), "mse", metrics=["mae"])
        model.fit(X, X[:, :1], batch_size=6, verbose=0)
        model.optimizer = k.optimizers.SGD(0.5)
        logs.append(model.fit(X, X[:, :1], batch_size=6, epochs=2, verbose=0).history)
        assert int(model.optimizer.iterations.numpy() if k is dp else model.optimizer.iterations) == 2
    for name, values in logs[1].items():
        np.testing.assert_allclose(logs[0][name], values, rtol=1e-5, err_msg=name)


def test_a_callback_may_change_the_optimizer():
    def trained(k):
        class Change(k.callbacks.Callback):
            def on_epoch_end(self, epoch, logs=None):
                if epoch == 0:
                    self.model.optimizer = dp.optimizers.SGD(0.5)

        model = k.Sequential([k.Input((2,)), k.layers.Dense(1, kernel_initializer="ones")])
        model.optimizer = "adam"  # until `compile`
        assert type(model.optimizer).__name__ == "Adam"
        model.compile(k.optimizers.SGD(0.1), "mse")
        model.fit(X, X[:, :1], batch_size=6, epochs=2, verbose=0, shuffle=False, callbacks=[Change()])
        return model

    model, twice = trained(dp), dp.Sequential([dp.Input((2,)), dp.layers.Dense(1, kernel_initializer="ones")])
    for rate in (0.1, 0.5):
        twice.compile(dp.optimizers.SGD(rate), "mse")
        twice.fit(X, X[:, :1], batch_size=6, verbose=0, shuffle=False)
    np.testing.assert_allclose(model.get_weights()[0], twice.get_weights()[0], rtol=1e-6)


@pytest.mark.parametrize("finalize", [False, True])
def test_progress_of_arrays(finalize, capsys):
    for k in (dp, keras):
        bar = k.utils.Progbar(3, verbose=2)
        bar.update(1, [("loss", np.array([0.0, 1.0, 2.0])), ("small", np.float32(1e-5))])
        bar.update(3, [("loss", 4.0)], finalize=finalize)
        if not finalize:
            bar.update(3, finalize=True)
    lines = [line for line in capsys.readouterr().out.splitlines() if "loss" in line]
    ours, theirs = (line.partition(" - loss")[2].rstrip() for line in lines)
    assert ours == theirs


def two_optimizers(k):
    k.utils.set_random_seed(0)
    layers = [k.layers.Dense(1, kernel_initializer="ones", name=name) for name in ("first", "second")]
    model = k.Sequential([k.Input((2,)), *layers])
    slow, fast = k.optimizers.SGD(0.1, name="slow"), k.optimizers.Adam(0.01, name="fast")
    optimizers = k.optimizers.OptimizerMap(slow, {"(.*/)?second/.*": fast})
    model.compile(k.optimizers.MultiOptimizer(optimizers), "mse")
    return model


@pytest.mark.parametrize(
    "callback",
    [
        lambda k: k.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.5, verbose=1),
        lambda k: k.callbacks.ReduceLROnPlateau("loss", patience=1, min_delta=100.0, min_lr=0.004, verbose=1),
    ],
    ids=["scheduler", "plateau"],
)
def test_learning_rates_of_several_optimizers(callback, capsys):
    logs, lines = [], []
    for k in (dp, keras):
        history = two_optimizers(k).fit(X, X[:, :1], epochs=4, batch_size=6, verbose=0, callbacks=[callback(k)]).history
        logs.append(history)
        lines.append(sorted(line[:60] for line in capsys.readouterr().out.splitlines() if line))
    assert logs[0].keys() == logs[1].keys()
    for name, values in logs[1].items():
        np.testing.assert_allclose(logs[0][name], values, rtol=1e-5, err_msg=name)
    assert lines[0] == lines[1]


def test_fields_that_no_input_takes_are_named():
    fields = {"a": X, "b": X}
    for k in (dp, keras):
        symbol = k.Input((2,), name="a")
        model = k.Model({"a": symbol}, k.layers.Dense(1)(symbol))
        for compute in (model, lambda x, model=model: model.predict(x, verbose=0)):
            with pytest.warns(UserWarning, match="The structure of `inputs` doesn't match the expected structure"):
                compute(fields)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model({"a": X})


class Optional:
    """A layer whose second input may be missing."""

    @staticmethod
    def of(k):
        class MayAdd(k.layers.Layer):
            def __init__(self, **options):
                super().__init__(**options)
                self.dense = k.layers.Dense(2, kernel_initializer="ones")

            def call(self, x, other=None):
                return self.dense(x if other is None else x + other)

        return MayAdd


def model_with_option(k, nested):
    x, other = k.Input((2,), name="x"), k.Input((2,), name="other", optional=True)
    model = k.Model({"x": x, "other": other} if nested is dict else [x, other], Optional.of(k)()(x, other))
    model.compile("sgd", "mse")
    return model


@pytest.mark.parametrize("nested", [dict, list])
def test_inputs_may_be_left_out(nested):
    results = []
    for k in (dp, keras):
        model, result = model_with_option(k, nested), []
        for other in (None, X):
            data = {"x": X, "other": other} if nested is dict else [X, other]
            result += [value(model(data)), model.predict(data, verbose=0)] if k is dp else [value(model(data))] * 2
            if nested is dict:
                result.append(model.fit(data, X, epochs=2, verbose=0, batch_size=6).history["loss"])
                result.append(model.evaluate(data, X, verbose=0))
        results.append(result)
        absent = {"x": None, "other": X} if nested is dict else [None, X]
        with pytest.raises(ValueError, match="is not optional, but None was passed"):
            model(absent)
    for ours, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)
    if nested is dict:
        with pytest.raises(ValueError, match="is not optional, but None was passed"):
            model_with_option(dp, dict).predict({"x": None, "other": X}, verbose=0)


def test_options_are_in_files(tmp_path):
    model = model_with_option(dp, dict)
    model.save(tmp_path / "model.keras")
    loaded = dp.models.load_model(tmp_path / "model.keras", custom_objects={"MayAdd": Optional.of(dp)})
    for other in (None, X):
        data = {"x": X, "other": other}
        np.testing.assert_allclose(loaded.predict(data, verbose=0), model.predict(data, verbose=0))
        np.testing.assert_allclose(dp.models.clone_model(model)(data).shape, (6, 2))


def test_an_input_of_a_tensor():
    for k in (dp, keras):
        tensor = k.KerasTensor((None, 2), dtype="float32")
        symbol = k.Input(tensor=tensor)
        assert symbol is tensor
        model = k.Model(symbol, k.layers.Dense(3)(symbol))
        assert (model.input_shape, model.output_shape) == ((None, 2), (None, 3))
        assert type(model.layers[0]).__name__ == "InputLayer"
        for wrong in ({"batch_shape": (None, 3)}, {"dtype": "int32"}):
            with pytest.raises(ValueError, match="cannot provide an incompatible"):
                k.Input(tensor=tensor, **wrong)
        with pytest.raises(ValueError, match="must be a KerasTensor"):
            k.layers.InputLayer(input_tensor=np.ones((2, 2)))


def test_cells_of_ones_own_from_a_configuration():
    for k in (dp, keras):

        class Cell(k.layers.SimpleRNNCell):
            """A cell that no module registers."""

        config = k.layers.RNN([Cell(2), k.layers.GRUCell(3)]).get_config()
        layer = k.layers.RNN.from_config(config, custom_objects={"Cell": Cell})
        assert layer(np.ones((2, 4, 3), np.float32)).shape == (2, 3)
        if k is dp:  # Keras needs a scope, too
            wrapped = k.layers.Bidirectional(k.layers.RNN(Cell(2))).get_config()
            layer = k.layers.Bidirectional.from_config(wrapped, custom_objects={"Cell": Cell})
            assert layer(np.ones((2, 4, 3), np.float32)).shape == (2, 4)
        cells = k.layers.StackedRNNCells([Cell(2)]).get_config()
        assert type(k.layers.StackedRNNCells.from_config(cells, custom_objects={"Cell": Cell}).cells[0]) is Cell


class OwnLayer(dp.layers.Layer):
    """Doubles."""

    def call(self, inputs):
        return inputs * 2


def test_custom_objects_of_wrappers():
    config = dp.layers.TimeDistributed(OwnLayer()).get_config()
    layer = dp.layers.TimeDistributed.from_config(config, custom_objects={"OwnLayer": OwnLayer})
    np.testing.assert_array_equal(layer(np.ones((1, 2, 3))), np.full((1, 2, 3), 2))


@pytest.mark.parametrize("writer", ["dptrain", "keras"])
def test_models_in_folders(tmp_path, writer):
    k = {"dptrain": dp, "keras": keras}[writer]
    model = k.Sequential([k.Input((2,)), k.layers.Dense(3), k.layers.Dense(1)])
    model.compile("adam", "mse")
    model.fit(X, X[:, :1], verbose=0)
    expected = model.predict(X, verbose=0)
    k.saving.save_model(model, tmp_path / "folder", zipped=False)
    assert sorted(path.name for path in (tmp_path / "folder").iterdir() if path.is_file()) == [
        *("config.json", "metadata.json", "model.weights.h5"),
    ]
    for other in (dp, keras):
        loaded = other.saving.load_model(tmp_path / "folder")
        np.testing.assert_allclose(loaded.predict(X, verbose=0), expected, rtol=1e-5)
    assert int(dp.saving.load_model(tmp_path / "folder").optimizer.iterations.numpy()) == 1
    with pytest.raises(ValueError, match="`zipped=False`"):
        k.saving.save_model(model, tmp_path / "folder.keras", zipped=False)


class Numbers:
    """Samples by index, as PyTorch's data sets have them."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        return np.full(2, index), index


@pytest.mark.parametrize("backend", [None, "torch", "tensorflow", "jax"])
def test_data_sets_are_split_for_any_backend(backend):
    left, right = dp.utils.split_dataset(Numbers(), left_size=0.6, preferred_backend=backend)
    np.testing.assert_array_equal(left[0], [[0, 0], [1, 1], [2, 2]])
    np.testing.assert_array_equal(right[1], [3, 4])
    with pytest.raises(ValueError, match="`preferred_backend` must be"):
        dp.utils.split_dataset(X, 0.5, preferred_backend="mxnet")
