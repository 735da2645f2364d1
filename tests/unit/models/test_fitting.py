"""What Keras' `fit`, `evaluate` and `predict` take and do, on arrays."""

import os
import signal

import numpy as np
import pytest

import dptrain as dp
from dptrain.batches.inputs import Samples, split_off, weights_of_classes
from dptrain.callbacks import Callback
from dptrain.data.loading import Split
from dptrain.errors import ConfigError, DataError
from dptrain.runtime.types import TYPES


def toy(rows: int = 40) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.standard_normal((rows, 5)), rng.integers(0, 3, rows)


def build(seed: int = 1, **options) -> dp.Sequential:
    model = dp.Sequential([dp.layers.Dense(6, "tanh", input_shape=(5,)), dp.layers.Dense(3, "softmax")], seed=seed)
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], dtype="float64", **options)
    return model


def bits(model: dp.Sequential) -> bytes:
    return b"".join(weight.tobytes() for weight in model.get_weights())


class Events(Callback):
    """Writes down every hook."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __getattribute__(self, name: str):
        if name.startswith("on_") and name not in ("on_batch_begin", "on_batch_end"):
            return lambda *arguments: self.seen.append(" ".join([name[3:], *map(str, arguments[:-1])]))
        return super().__getattribute__(name)

    # Hooks of batches are called only where a callback has them.
    def on_train_batch_begin(self, batch, logs=None): ...
    def on_train_batch_end(self, batch, logs=None): ...
    def on_test_batch_begin(self, batch, logs=None): ...
    def on_test_batch_end(self, batch, logs=None): ...
    def on_predict_batch_begin(self, batch, logs=None): ...
    def on_predict_batch_end(self, batch, logs=None): ...


def test_the_order_of_events():
    x, y = toy(20)
    events = Events()
    build().fit(x, y, batch_size=10, epochs=1, verbose=0, callbacks=[events], validation_split=0.3)
    batches = ["train_batch_begin 0", "train_batch_end 0", "train_batch_begin 1", "train_batch_end 1"]
    tested = ["test_begin", "test_batch_begin 0", "test_batch_end 0", "test_end"]
    assert events.seen == ["train_begin", "epoch_begin 0", *batches, *tested, "epoch_end 0", "train_end"]
    events.seen.clear()
    model = build()
    model.evaluate(x, y, batch_size=15, verbose=0, callbacks=[events])
    assert events.seen == ["test_begin", *[f"test_batch_{w} {n}" for n in (0, 1) for w in ("begin", "end")], "test_end"]
    events.seen.clear()
    outputs = model.predict(x, callbacks=[events])
    assert events.seen == ["predict_begin", "predict_batch_begin 0", "predict_batch_end 0", "predict_end"]
    np.testing.assert_array_equal(outputs, model.predict(x))


@pytest.mark.parametrize("nest", [dict, lambda parts: list(parts.values()), lambda parts: tuple(parts.values())])
def test_validation_split_of_nested_arrays(nest):
    rng = np.random.default_rng(4)
    x = {"a": rng.random((10, 3)), "b": rng.random((10, 2))}
    y = {"p": rng.random((10, 2)), "q": rng.random((10, 1))}
    weights = {"p": rng.random(10), "q": rng.random(10)}

    def fitted(rows, **options):
        inputs = {"a": dp.layers.Input((3,), name="a"), "b": dp.layers.Input((2,), name="b")}
        merged = dp.layers.Concatenate()(list(inputs.values()))
        outputs = {"p": dp.layers.Dense(2, name="p")(merged), "q": dp.layers.Dense(1, name="q")(merged)}
        model = dp.Model(list(inputs.values()), list(outputs.values()), seed=1)
        model.compile("sgd", "mse")
        arguments = [nest({name: part[rows] for name, part in parts.items()}) for parts in (x, y, weights)]
        return model.fit(arguments[0], arguments[1], sample_weight=arguments[2], epochs=2, verbose=0, **options).history

    last = [nest({name: part[7:] for name, part in parts.items()}) for parts in (x, y, weights)]
    assert fitted(slice(None), validation_split=0.3) == fitted(slice(7), validation_data=tuple(last))
    with pytest.raises(ConfigError, match=r"Found incompatible type in the input: \[<class 'float'>\]"):
        build().fit({"a": [1.0, 2.0], "b": x["b"]}, nest(y), validation_split=0.3, verbose=0)


def test_validation_split_takes_the_last_rows():
    x, y = toy(40)
    split = build().fit(x, y, epochs=2, verbose=0, validation_split=0.25)
    explicit = build().fit(x[:30], y[:30], epochs=2, verbose=0, validation_data=(x[30:], y[30:]))
    assert split.history == explicit.history
    for fraction in (1.0, -0.1, 0.999):
        with pytest.raises(ConfigError, match="validation_split"):
            build().fit(x, y, verbose=0, validation_split=fraction)
    with pytest.raises(ConfigError, match="contains 1 samples, which is not sufficient"):
        split_off(Samples(x[:1], y[:1]), 0.5)


def test_class_weights_leave_the_validation_alone():
    x, y = toy(40)
    weights = {0: 5.0, 2: 0.1}
    fit = {"epochs": 3, "verbose": 0, "class_weight": weights}
    trained = {"sample_weight": weights_of_classes(y[:30], weights)}
    expected = build().fit(x[:30], y[:30], **(fit | trained | {"class_weight": None}), validation_data=(x[30:], y[30:]))
    assert build().fit(x, y, **fit, validation_split=0.25).history == expected.history
    assert build().fit(x[:30], y[:30], **fit, validation_data=(x[30:], y[30:])).history == expected.history
    explicit = build().fit(x[:30], y[:30], **fit, validation_data=iter([(x[30:], y[30:])] * 3), validation_steps=1)
    np.testing.assert_allclose(explicit.history["val_loss"], expected.history["val_loss"], rtol=1e-12)
    ours = build()
    ours.fit(x, y, **fit, validation_split=0.25)
    assert ours.evaluate(x[30:], y[30:], verbose=0)[0] == expected.history["val_loss"][-1]


class StopAtThird(Callback):
    """Ends every evaluation and prediction with its third batch."""

    def on_test_batch_end(self, batch, logs=None):
        self.last = batch
        self.model.stop_evaluating = batch == 2

    def on_predict_batch_end(self, batch, logs=None):
        self.last = batch
        self.model.stop_predicting = batch == 2


def test_a_callback_stops_evaluating_and_predicting():
    x, y = toy(40)
    model, stop = build(), StopAtThird()
    part = model.evaluate(x[:6], y[:6], verbose=0)
    options = {"verbose": 0, "callbacks": [stop]}

    def endless(*arrays):
        while True:
            yield tuple(array[2 * step : 2 * step + 2] for array in arrays) if (step := next(count)) < 3 else arrays

    for _ in range(2):  # as in Keras each begins anew
        count = iter(range(100))
        np.testing.assert_allclose(model.evaluate(endless(x, y), **options), part, rtol=1e-12)
        assert (stop.last, model.stop_evaluating) == (2, True)
        np.testing.assert_allclose(model.evaluate(x, y, batch_size=2, **options), part, rtol=1e-12)
        assert stop.last == 2
        for data in (x, endless(x)):
            count = iter(range(100))
            predictions = model.predict(data, batch_size=None if data is not x else 2, **options)
            np.testing.assert_allclose(predictions, model.predict(x[:6], verbose=0), rtol=1e-12)
            assert (stop.last, model.stop_predicting) == (2, True)
    fit = {"validation_data": (x, y), "validation_batch_size": 2, "epochs": 2}
    history = model.fit(x, y, **options, **fit).history
    assert history["val_loss"][-1] == pytest.approx(model.evaluate(x[:6], y[:6], verbose=0)[0], rel=1e-12)
    assert len(history["loss"]) == 2


def test_validation_on_some_epochs():
    x, y = toy()
    arguments = {"verbose": 0, "validation_data": (x, y), "epochs": 5}
    assert len(build().fit(x, y, **arguments, validation_freq=2).history["val_loss"]) == 2
    assert len(build().fit(x, y, **arguments, validation_freq=[1, 4, 5]).history["val_loss"]) == 3
    model = build()
    steps = model.fit(x, y, **{**arguments, "epochs": 1}, validation_steps=2, validation_batch_size=7)
    expected = model.evaluate(x[:14], y[:14], verbose=0)
    np.testing.assert_allclose([steps.history["val_loss"][0], steps.history["val_accuracy"][0]], expected, rtol=1e-12)


def test_going_on_at_an_epoch():
    x, y = toy()
    model, parts = build(), build()
    model.fit(x, y, epochs=4, verbose=0)
    parts.fit(x, y, epochs=1, verbose=0)
    later = parts.fit(x, y, epochs=4, initial_epoch=1, verbose=0)
    assert later.epoch == [1, 2, 3]
    assert bits(parts) == bits(model)
    assert parts.history is later


def test_epochs_of_some_steps_go_on_in_the_data():
    x, y = toy(40)
    model, parts = build(), build()
    model.fit(x, y, batch_size=10, epochs=1, verbose=0)
    parts.fit(x, y, batch_size=10, epochs=2, steps_per_epoch=2, verbose=0)
    assert bits(parts) == bits(model)
    with pytest.warns(UserWarning, match="Your input ran out of data; interrupting training"):
        history = build().fit(x, y, batch_size=10, epochs=2, steps_per_epoch=3, verbose=0)
    assert history.epoch == [0, 1]


def test_some_rows_of_a_data_set():
    x, y = toy()
    rows = np.random.default_rng(3).permutation(40)[:29]
    alone, part = build(), build()
    expected = alone.fit(x[rows], y[rows], batch_size=8, epochs=2, validation_data=(x[:9], y[:9]), verbose=0)
    actual = part.fit(Split(x, y, rows), batch_size=8, epochs=2, validation_data=Split(x, y, np.arange(9)), verbose=0)
    assert actual.history == expected.history
    assert bits(part) == bits(alone)
    assert part.evaluate(Split(x, y, rows), verbose=0) == alone.evaluate(x[rows], y[rows], verbose=0)


def test_ranks_must_agree_on_which_rows_are_used_and_on_how_many_each_has():
    x, y = toy()
    splits = [Split(x, y), Split(x, y, np.arange(29)), Split(x, y, np.arange(30)), Split(x, y, np.arange(29)[::-1])]
    splits += [Split(x, y, total=80), Split(x, y, total=81)]
    facts = [Samples(split.x, split.y, split=split).facts for split in splits]
    assert all(facts[i] != facts[j] for i in range(len(facts)) for j in range(i))
    assert facts[0] == Samples(x, y).facts
    assert facts[4] == Samples(x + 1, y, split=Split(x + 1, y, total=80)).facts  # its own are each rank's


def test_every_epoch_of_some_steps_of_a_split_is_a_new_pass():
    x, y = toy()
    model, parts = build(), build()
    model.fit(x[:20], y[:20], batch_size=10, epochs=2, shuffle=False, verbose=0)
    parts.fit(Split(x, y), batch_size=10, epochs=2, steps_per_epoch=2, shuffle=False, verbose=0)
    assert bits(parts) == bits(model)


def test_shards_that_compile_is_told_are_those_of_the_environment(monkeypatch):
    x, y = toy(43)
    configured, from_environment, plain = build(shards_per_batch=3), build(), build()
    configured.fit(x, y, batch_size=16, verbose=0)
    plain.fit(x, y, batch_size=16, verbose=0)
    monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", "3")
    from_environment.fit(x, y, batch_size=16, verbose=0)
    assert bits(configured) == bits(from_environment) != bits(plain)
    assert configured._compile_arguments["shards_per_batch"] == 3


def test_one_rank_sends_no_gradients_that_could_be_rounded():
    x, y = toy(43)
    exact, rounded = build(), build(comm_dtype="bfloat16")
    for net in (exact, rounded):
        net.fit(x, y, batch_size=16, verbose=0)
    assert bits(rounded) == bits(exact)
    assert rounded._compile_arguments["comm_dtype"] == "bfloat16"


def test_gradients_are_not_rounded_where_bits_are_promised(monkeypatch):
    with pytest.raises(ConfigError, match="comm_dtype = 'float16': not supported with a fixed number of shards"):
        build(comm_dtype="float16", shards_per_batch=3)
    x, y = toy(43)
    model = build(comm_dtype="float16")
    monkeypatch.setenv("DPTRAIN_REPRODUCIBLE", "3")
    with pytest.raises(ConfigError, match="comm_dtype = 'float16': not supported with a fixed number of shards"):
        model.fit(x, y, verbose=0)
    for kind in ("gemm", "conv"):
        with pytest.raises(ConfigError, match=f"{kind} = 'auto': not supported with a fixed number of shards"):
            build(shards_per_batch=3, **{kind: "auto"})
    with pytest.raises(ConfigError, match="comm_dtype = 'float32': expected None, 'bfloat16' or 'float16'"):
        build(comm_dtype="float32")


@pytest.mark.parametrize("options", [{"shards_per_batch": 2}, {"shuffle": "batch"}])
def test_rows_of_a_ranks_own_are_not_cut_otherwise(options):
    model = build(**{name: value for name, value in options.items() if name != "shuffle"})
    x, y = toy()
    with pytest.raises(ConfigError, match="not supported with static sharding"):
        model.fit(Split(x, y, total=80), shuffle=options.get("shuffle", True), verbose=0)


def test_stop_training_after_a_step_and_after_an_epoch():
    class Stop(Callback):
        def __init__(self, batch: int) -> None:
            super().__init__()
            self.batch, self.seen = batch, []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(batch)
            self.model.stop_training = batch == self.batch

        def on_epoch_end(self, epoch, logs=None):
            self.seen.append(f"epoch {epoch}")

    x, y = toy(40)
    stop = Stop(1)
    build().fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[stop])
    assert stop.seen == [0, 1, "epoch 0"]
    stop = Stop(3)
    build().fit(x, y, batch_size=10, epochs=3, verbose=0, callbacks=[stop])
    assert stop.seen == [0, 1, 2, 3, "epoch 0"]


def test_logs_of_a_step_are_the_means_so_far():
    class Losses(Callback):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[dict[str, float]] = []

        def on_train_batch_end(self, batch, logs=None):
            self.seen.append(dict(logs))

    x, y = toy(40)
    losses = Losses()
    history = build().fit(x, y, batch_size=10, verbose=0, callbacks=[losses])
    assert [sorted(logs) for logs in losses.seen] == [["accuracy", "loss"]] * 4
    assert losses.seen[-1]["loss"] == history.history["loss"][0]
    assert len({logs["loss"] for logs in losses.seen}) == 4


def test_one_batch_at_a_time():
    x, y = toy(40)
    model, parts = build(), build()
    history = model.fit(x, y, batch_size=10, shuffle=False, verbose=0)
    logs = []
    for begin in range(0, 40, 10):
        logs.append(parts.train_on_batch(x[begin : begin + 10], y[begin : begin + 10], return_dict=True))
    assert bits(parts) == bits(model)
    for key, values in history.history.items():  # each batch has its own, as in Keras
        np.testing.assert_allclose(np.mean([batch_logs[key] for batch_logs in logs]), values[0], rtol=1e-12)
    tested = parts.test_on_batch(x[:7], y[:7])
    np.testing.assert_allclose(tested, parts.evaluate(x[:7], y[:7], verbose=0), rtol=1e-12)
    assert parts.test_on_batch(x[:7], y[:7]) == tested
    np.testing.assert_array_equal(parts.predict_on_batch(x[:3]), parts.predict(x[:3]))


@pytest.mark.parametrize(
    "convert", [lambda y: y.astype("f4"), lambda y: y[:, None] * 1.0, lambda y: y == 1], ids=["float", "column", "bool"]
)
def test_labels_of_another_type(convert):
    x, y = toy()
    labels = convert(y)
    expected = build().fit(x, labels.astype(int), verbose=0).history
    assert build().fit(x, labels, verbose=0).history == expected
    with pytest.raises(DataError, match=r"y: label \d.5 at index 0; labels must be integers"):
        build().fit(x, y + 0.5, verbose=0)


@pytest.mark.parametrize(
    ("output", "target", "aligned"),
    [
        ((1,), (), (1,)),
        ((2, 3), (1, 3), (1, 3)),
        ((2, 3), (1, 1), (1, 1)),
        ((2, 1), (2,), (2, 1)),
        ((2,), (2, 1), (2,)),
        ((6,), (1,), (1,)),
    ],
)
def test_targets_are_squeezed_expanded_and_repeated(output, target, aligned):
    x, y = toy(10)[0], np.random.default_rng(1).standard_normal((10, *target))
    full = np.broadcast_to(y.reshape(10, *aligned), (10, *output))
    results = []
    for targets in (y, full):
        model = dp.Sequential(
            [dp.layers.Dense(int(np.prod(output)), input_shape=(5,)), dp.layers.Reshape(output)], seed=1
        )
        model.compile("sgd", "mse", metrics=["mae"], dtype="float64")
        results.append([*model.fit(x, targets, verbose=0).history.values(), model.predict(x, verbose=0)])
    for mine, other in zip(*results, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-6)


@pytest.mark.parametrize(("output", "target"), [((3,), ()), ((3,), (2,)), ((2, 3), (3,)), ((3,), (2, 3))])
def test_targets_that_do_not_go_with_the_output(output, target):
    x = toy(10)[0]
    model = dp.Sequential([dp.layers.Dense(int(np.prod(output)), input_shape=(5,)), dp.layers.Reshape(output)])
    model.compile("sgd", "mse")
    with pytest.raises(DataError, match="y: expected targets of shape"):
        model.fit(x, np.zeros((10, *target)), verbose=0)


def test_weights_of_classes():
    weights = weights_of_classes(np.array([[0], [2], [1], [2]], np.uint8), {2: 0.5, 1: 3})
    assert weights.tolist() == [1, 0.5, 3, 0.5]
    assert weights_of_classes(np.eye(3)[[2, 0]], {2: 7.0}).tolist() == [7, 1]
    with pytest.raises(ConfigError, match=r"class_weight\[1\] = nan"):
        weights_of_classes(np.array([1]), {1: float("nan")})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"sample_weight": np.ones(40), "class_weight": {0: 1.0}}, ConfigError, "at the same time"),
        ({"class_weight": [1.0, 2.0]}, ConfigError, r"class_weight = \[1.0, 2.0\]: expected a dictionary"),
        ({"class_weight": {"a": 2.0}}, ConfigError, "class_weight = {'a': 2.0}: expected a dictionary"),
        ({"sample_weight": np.ones(39)}, DataError, "sample_weight: expected \\(40,\\) real numbers"),
        ({"sample_weight": np.ones((40, 2))}, DataError, "sample_weight: expected \\(40,\\) real numbers"),
        ({"sample_weight": np.ones(())}, DataError, "sample_weight: expected \\(40,\\) real numbers"),
        ({"sample_weight": np.full(40, np.inf)}, DataError, "40 values are not finite"),
        ({"epochs": -1}, ConfigError, "epochs = -1: expected an integer >= 0"),
        ({"steps_per_epoch": 0}, ConfigError, "steps_per_epoch = 0"),
        ({"validation_data": (1, 2, 3, 4)}, ConfigError, "found 4 parts"),
        ({"validation_freq": 0}, ConfigError, "validation_freq = 0"),
        ({"validation_freq": 1.5}, ConfigError, "Expected `validation_freq` to be a list or int. Received: .*=1.5 of"),
        ({"validation_freq": "2"}, ConfigError, "Expected `validation_freq` to be a list or int"),
        ({"epochs": 1.5}, TypeError, "epochs = 1.5: expected an integer >= 0"),
        ({"epochs": "3"}, TypeError, "epochs = '3': expected an integer >= 0"),
        ({"epochs": None}, TypeError, "epochs = None: expected an integer >= 0"),
        ({"initial_epoch": 0.0}, TypeError, "initial_epoch = 0.0: expected an integer >= 0"),
        ({"steps_per_epoch": 2.0}, TypeError, "steps_per_epoch = 2.0: expected an integer >= 1"),
        ({"validation_steps": "1"}, TypeError, "validation_steps = '1': expected an integer >= 1"),
        ({"batch_size": 8.0}, ConfigError, "batch_size = 8.0: expected an integer >= 1"),
        ({"batch_size": "8"}, TypeError, "batch_size = '8': expected an integer >= 1"),
        ({"validation_batch_size": 4.0}, ConfigError, "validation_batch_size = 4.0: expected an integer >= 1"),
    ],
)
def test_what_fit_refuses(arguments, error, message):
    x, y = toy(40)
    with pytest.raises(error, match=message):
        build().fit(x, y, verbose=0, **arguments)


@pytest.mark.parametrize("name", ["batch_size", "steps"])
@pytest.mark.parametrize("value", [0, -1, 2.0, "2"])
def test_numbers_that_evaluate_and_predict_refuse(name, value):
    x, y = toy(20)
    with pytest.raises(ConfigError, match=f"{name} = {value!r}: expected an integer >= 1"):
        build().evaluate(x, y, verbose=0, **{name: value})
    with pytest.raises(ConfigError, match=f"{name} = {value!r}: expected an integer >= 1"):
        build().predict(x, **{name: value})


@pytest.mark.parametrize("dtype", [name for name, known in TYPES.items() if not known.is_numpy])
def test_arrays_of_types_that_numpy_lacks(tmp_path, dtype):
    """Their kinds in NumPy are V and f; they are trained on as float32 of the same numbers."""
    x, labels = toy(40)
    arrays = [array.astype(dtype) for array in (x, x[:, :3], labels)]
    losses, outputs = [], []
    for x, y, weights in (arrays, [array.astype(np.float32) for array in arrays]):
        model = build()
        model.compile("sgd", "mse")
        losses.append(model.fit(x, y, sample_weight=weights, verbose=0).history["loss"])
        model.export(tmp_path / "model")
        program = dp.saving.load_program(tmp_path / "model")
        outputs += [model.predict(x, verbose=0), model.predict_on_batch(x), program(x)]
    assert losses[0] == losses[1]
    for output in outputs[1:]:
        np.testing.assert_array_equal(output, outputs[0])


@pytest.mark.parametrize("wrong", [np.full((40, 3), "1"), np.full((40, 3), 1j)])
def test_targets_that_are_no_real_numbers(wrong):
    model = build()
    model.compile("sgd", "mse")
    with pytest.raises(DataError, match=f"y has dtype {wrong.dtype}: expected real numbers"):
        model.fit(toy()[0], wrong, verbose=0)


def test_numbers_of_numpy():
    x, y = toy(40)
    plain = {"batch_size": 4, "epochs": 4, "steps_per_epoch": 2, "validation_freq": 2, "validation_batch_size": 3}
    arrays = {name: np.int64(number) for name, number in plain.items()}
    logs, other = (build().fit(x, y, verbose=0, validation_data=(x, y), **options) for options in (plain, arrays))
    assert logs.history == other.history
    assert (len(logs.history["loss"]), len(logs.history["val_loss"])) == (4, 2)
    assert build().evaluate(x, y, np.int32(4), 0, None, np.uint8(2)) == build().evaluate(x, y, 4, 0, None, 2)


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 4}, {"callbacks": [Events()]}])
def test_nothing_to_predict(arguments):
    x, _ = toy()
    outputs = build().predict(x[:0], **arguments)
    assert (outputs.shape, outputs.dtype) == ((0, 3), np.float64)
    assert build().predict_on_batch(x[:0]).shape == (0, 3)


@pytest.mark.parametrize("arguments", [{}, {"batch_size": 4}, {"callbacks": [Events()]}, {"verbose": 1}])
def test_nothing_to_evaluate_gives_no_logs(arguments):
    x, y = toy()
    assert build().evaluate(x[:0], y[:0], **{"verbose": 0, **arguments}) == []
    assert build().evaluate(x[:0], y[:0], return_dict=True, **{"verbose": 0, **arguments}) == {}
    history = build().fit(x, y, validation_data=(x[:0], y[:0]), **{"verbose": 0, **arguments}).history
    assert list(history) == ["loss", "accuracy"]


def test_the_line_of_an_evaluation_of_nothing(capsys):
    x, y = toy()
    build().evaluate(x[:0], y[:0], verbose=2)
    assert capsys.readouterr().out.endswith(" samples/s\n")


def test_fit_before_compile_and_without_targets():
    x, y = toy()
    model = dp.Sequential([dp.layers.Dense(3, input_shape=(5,))])
    with pytest.raises(ValueError, match=r"You must call `compile\(\)` before calling `fit\(\)`"):
        model.fit(x, y)
    with pytest.raises(ValueError, match=r"You must call `compile\(\)`"):
        _ = model.optimizer
    with pytest.raises(DataError, match="y is missing"):
        build().fit(x, verbose=0)


def test_a_layer_that_is_frozen_after_training():
    x, y = toy()
    model = build()
    model.fit(x, y, verbose=0)
    before = model.get_weights()
    model.layers[0].trainable = False
    model.compile("adam", "sparse_categorical_crossentropy", dtype="float64")
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.fit(x, y, verbose=0)
    unchanged = [np.array_equal(old, new) for old, new in zip(before, model.get_weights(), strict=True)]
    assert unchanged == [True, True, False, False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("adam", "mse", ["mae"]), r"loss_weights = \['mae'\]: expected numbers; metrics is the fourth argument"),
        (("adam", "mse", None, None, None, False, 0), "steps_per_execution = 0: expected an integer >= 1"),
        (("adam", "mse", None, None, None, False, 2.0), "steps_per_execution = 2.0: expected an integer or 'auto'"),
    ],
)
def test_what_compile_refuses(arguments, message):
    with pytest.raises(ConfigError, match=message):
        dp.Sequential([dp.layers.Dense(3, input_shape=(5,))]).compile(*arguments)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_sigterm_ends_at_once_what_saves_nothing(method, capsys):
    x, y = toy()
    model = build()
    mode = {"fit": "train", "evaluate": "test"}.get(method, method)
    send = dp.callbacks.LambdaCallback(**{f"on_{mode}_batch_end": lambda *_: os.kill(os.getpid(), signal.SIGTERM)})
    with pytest.raises(SystemExit) as ended:
        getattr(model, method)(x, *([y] if method != "predict" else []), verbose=0, callbacks=[send])
    assert ended.value.code == 75
    assert capsys.readouterr().err == "dptrain: ended by SIGTERM\n"
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
