"""Models, programs, metrics and layers that several threads use at once give the answers that one thread gets."""

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, ops
from dptrain.errors import ConfigError

RNG = np.random.default_rng(3)
X, Y = RNG.random((96, 5), np.float32), RNG.integers(0, 3, 96)
ROWS = [1, 2, 3, 7, 16, 33, 96]
COMPILED = pytest.mark.parametrize("jit_compile", [True, False])


@pytest.fixture(autouse=True)
def _many_turns() -> Iterator[None]:
    """Let threads take turns often: races show within a second."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


def build(jit_compile: bool = True, seed: int = 1, **options: Any) -> dp.Sequential:
    stack = [layers.Input((5,)), layers.Dense(16, "tanh"), layers.BatchNormalization(), layers.Dense(3, "softmax")]
    model = dp.Sequential(stack, seed=seed)
    model.compile(
        "sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu", jit_compile=jit_compile, **options
    )
    return model


def side_by_side(*actions: Callable[[int], Any], times: int = 14) -> None:
    """Call each action `times` times in a thread of its own, all at once; raise what one of them raises."""
    ready = threading.Barrier(len(actions))

    def run(action: Callable[[int], Any]) -> None:
        ready.wait(60)
        for number in range(times):
            action(number)

    with ThreadPoolExecutor(len(actions)) as pool:
        for future in [pool.submit(run, action) for action in actions]:
            future.result(60)


def close(actual: Any, expected: Any) -> None:
    assert np.allclose(actual, expected, rtol=1e-5, atol=1e-6), (actual, expected)


def is_one_of(actual: Any, states: Sequence[Any]) -> None:
    assert any(np.allclose(actual, state, rtol=1e-5, atol=1e-6) for state in states), "the answer of no state"


def by_rows(answer: Callable[[np.ndarray], Any]) -> Callable[[int], None]:
    """Return what compares an answer for changing numbers of rows with what one thread got."""
    expected = {rows: np.array(answer(X[:rows])) for rows in ROWS}

    def action(number: int) -> None:
        rows = ROWS[number % len(ROWS)]
        close(answer(X[:rows]), expected[rows])

    return action


@pytest.mark.sample(4)
@COMPILED
def test_predictions(jit_compile: bool):
    model = build(jit_compile)
    side_by_side(
        by_rows(lambda x: model.predict(x, verbose=0)),
        by_rows(model.predict_on_batch),
        by_rows(lambda x: model.predict(x, batch_size=5, verbose=0)),
        by_rows(model),
    )


def test_programs(tmp_path: Path):
    build().export(tmp_path / "model.program")
    program = dp.saving.load_program(tmp_path / "model.program", device="cpu")
    side_by_side(*[by_rows(program)] * 4)


@pytest.mark.sample(6)
@pytest.mark.parametrize("options", [{}, {"jit_compile": False}, {"run_eagerly": True}])
def test_all_side_by_side(options: dict[str, Any], tmp_path: Path):
    """While one thread trains, the others' answers are those of the weights between two of its steps."""
    steps = 12

    def trained(number: int, model: dp.Sequential) -> Any:
        return model.train_on_batch(X[:32], Y[:32], return_dict=True)

    model, alone = build(**options), build(**options)
    model.export(tmp_path / "model.program")
    program = dp.saving.load_program(tmp_path / "model.program", device="cpu")
    logs, states, evaluated = [], [], []
    for number in range(steps + 1):
        states.append(alone.predict(X, verbose=0))
        evaluated.append(alone.evaluate(X, Y, verbose=0))
        logs += [trained(number, alone)] if number < steps else []
    first = states[0]
    results: list[Any] = []

    def evaluates(number: int) -> None:
        is_one_of(model.evaluate(X, Y, verbose=0), evaluated)

    def predicts(number: int) -> None:
        is_one_of(model.predict(X, batch_size=(96, 10)[number % 2], verbose=0), states)
        close(program(X), first)

    side_by_side(
        lambda number: results.append(trained(number, model)),
        evaluates,
        predicts,
        lambda number: is_one_of(model(X), states),
        times=steps,
    )
    assert results == logs
    close(model.predict(X, verbose=0), states[-1])


def test_fit_beside_predictions():
    """Predictions go on beside another thread's `fit`; what would change its metrics or weights is refused."""
    model, alone = build(), build()
    expected = alone.fit(X, Y, batch_size=16, epochs=6, verbose=0).history
    states = [build().predict(X, verbose=0)]
    running, finished = threading.Event(), threading.Event()
    waited: list[bool] = []

    class Waits(dp.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            states.append(self.model.predict(X, verbose=0))
            if epoch == 2:
                assert self.model.evaluate(X, Y, verbose=0)  # in its own thread
                running.set()
                waited.append(finished.wait(30))

    with ThreadPoolExecutor(2) as pool:
        fit = pool.submit(model.fit, X, Y, batch_size=16, epochs=6, verbose=0, callbacks=[Waits()])
        try:
            assert running.wait(30)
            calls: dict[str, Callable[[], Any]] = {
                "evaluate": lambda: model.evaluate(X, Y, verbose=0),
                "train_on_batch": lambda: model.train_on_batch(X, Y),
                "test_on_batch": lambda: model.test_on_batch(X, Y),
                "fit": lambda: model.fit(X, Y, verbose=0),
                "compile": lambda: model.compile("sgd", "mse", device="cpu"),
            }
            for name, call in calls.items():
                with pytest.raises(ConfigError, match=rf"^{name}: thread '.*' is in this model's `fit`"):
                    call()
            close(model.predict(X, verbose=0), states[-1])
            close(model(X), states[-1])
        finally:
            finished.set()
        by_steps = pool.submit(lambda: [model.predict(X, batch_size=7, verbose=0) for _ in range(20)])
        assert fit.result(60).history == expected
        assert len(by_steps.result(60)) == 20
    assert waited == [True]
    close(model.predict(X, verbose=0), alone.predict(X, verbose=0))
    assert model.evaluate(X, Y, verbose=0)


def test_a_loop_of_ones_own_beside_predictions():
    """An optimizer's update is all done, or not at all, for whoever predicts."""

    def step(model: dp.Model, optimizer: dp.optimizers.Optimizer) -> None:
        with dp.GradientTape() as tape:
            loss = dp.losses.SparseCategoricalCrossentropy()(Y, model(X))
        weights = model.trainable_weights
        optimizer.apply_gradients(zip(tape.gradient(loss, weights), weights, strict=True))

    model, alone = build(), build()
    sgd, other = dp.optimizers.SGD(0.5), dp.optimizers.SGD(0.5)
    states = [alone.predict(X, verbose=0)]
    for _ in range(8):
        step(alone, other)
        states.append(alone.predict(X, verbose=0))
    side_by_side(
        lambda number: step(model, sgd),
        lambda number: is_one_of(model.predict(X, verbose=0), states),
        lambda number: is_one_of(model(X), states),
        times=8,
    )
    close(model.predict(X, verbose=0), states[-1])


def test_new_weights_beside_predictions(tmp_path: Path):
    """Weights that are set or loaded are all new or all old for whoever predicts."""
    model, files = build(), []
    values, states = [], []
    for seed in range(2):
        other = build(seed=seed)
        other.fit(X, Y, verbose=0)
        values.append(other.get_weights())
        states.append(other.predict(X, verbose=0))
        files.append(tmp_path / f"{seed}.weights.h5")
        other.save_weights(files[-1])
    model.set_weights(values[0])

    def replaces(number: int) -> None:
        if number % 3:
            model.set_weights(values[number % 2])
        else:
            model.load_weights(files[number % 2])

    def reads(number: int) -> None:
        weights = model.get_weights()
        assert any(all(map(np.array_equal, weights, candidate)) for candidate in values)

    side_by_side(
        replaces,
        lambda number: is_one_of(model.predict(X[:, :], batch_size=20, verbose=0), states),
        lambda number: is_one_of(model(X), states),
        reads,
        times=20,
    )


def test_the_first_calls():
    """Threads that come first find one set of weights and one program."""

    def answers(model: dp.Model) -> list[Any]:
        results: list[Any] = []
        calls = [lambda number: results.append(np.asarray(model(X)))] * 2
        calls += [lambda number: results.append(model.predict(X, verbose=0))] * 2
        side_by_side(*calls, times=1)
        return results

    class Own(dp.Model):
        def __init__(self) -> None:
            super().__init__(seed=5)
            self.first, self.second = layers.Dense(8, "tanh"), layers.Dense(2)
            self.traces = 0

        def call(self, inputs: Any) -> Any:
            self.add_loss(ops.mean(inputs))
            self.traces += 1
            return self.second(self.first(inputs))

    for model in (Own(), dp.Sequential([layers.Dense(4), layers.Dense(2)], seed=7)):
        result = answers(model)
        for array in result:
            close(array, result[0])
        assert len(model.weights) == 4
        if isinstance(model, Own):
            before = model.traces
            model.predict(X, verbose=0)
            assert model.traces == before


def test_losses_that_layers_add():
    """A step that is traced has the penalties of its own calls, whatever other threads call."""

    class Penalty(layers.Layer):
        def call(self, inputs: Any) -> Any:
            self.add_loss(1.0)
            for _ in range(20):  # others have a turn
                inputs = inputs * 1.0
            return inputs

    inputs = layers.Input((5,))
    outputs = layers.Dense(3, "softmax")(Penalty()(inputs))

    def build() -> dp.Model:
        model = dp.Model(inputs, outputs)
        model.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
        return model

    expected = build().evaluate(X, Y, verbose=0)
    assert expected > 1
    model = build()

    def evaluates(number: int) -> None:
        other = build() if number else model
        close(other.evaluate(X, Y, verbose=0), expected)

    side_by_side(evaluates, *[lambda number: model(X[:1])] * 3, times=8)


@pytest.mark.long
def test_models_that_share_layers():
    """One trains weights that the other predicts by: both see each other's, in one thread and in several."""

    def build() -> tuple[dp.Model, dp.Model]:
        inputs = layers.Input((5,))
        code = layers.Dense(4, "tanh")(inputs)
        encoder, whole = dp.Model(inputs, code, seed=2), dp.Model(inputs, layers.Dense(3, "softmax")(code), seed=2)
        whole.compile("sgd", "sparse_categorical_crossentropy", device="cpu")
        encoder.compile("sgd", "mse", device="cpu")
        return encoder, whole

    encoder, decoder = build()
    states = [encoder.predict(X, verbose=0)]
    for _ in range(10):
        decoder.train_on_batch(X, Y)
        states.append(encoder.predict(X, verbose=0))
        close(states[-1], encoder(X))
        assert not np.allclose(states[-1], states[-2], rtol=1e-5)
    encoder.compile("sgd", "mse", device="cpu")  # which takes it from the device, and back
    close(encoder.predict(X, verbose=0), states[-1])
    decoder.train_on_batch(X, Y)
    close(encoder.predict(X, verbose=0), encoder(X))
    assert not np.allclose(encoder.predict(X, verbose=0), states[-1], rtol=1e-5)

    decoder.compile("sgd", "sparse_categorical_crossentropy", device="cpu", dtype="float64")
    decoder.train_on_batch(X, Y)
    close(encoder.predict(X, verbose=0), encoder(X))

    encoder, decoder = build()
    side_by_side(
        lambda number: decoder.train_on_batch(X, Y),
        *[lambda number: is_one_of(encoder.predict(X, batch_size=40, verbose=0), states)] * 2,
        times=10,
    )
    close(encoder.predict(X, verbose=0), states[-1])


def test_a_callback_that_ends_a_prediction_ends_no_other():
    class Looks(dp.callbacks.Callback):
        def __init__(self, stops: bool) -> None:
            super().__init__()
            self.stops = stops

        def on_predict_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_predicting = self.model.stop_predicting or (self.stops and batch == 1)

    model = build()
    expected = model.predict(X, verbose=0)

    def predicts(stops: bool) -> None:
        close(model.predict(X, batch_size=8, verbose=0, callbacks=[Looks(stops)]), expected[: 16 if stops else 96])

    side_by_side(*[lambda number, stops=stops: predicts(stops) for stops in (True, False)] * 2, times=5)


def test_metrics():
    metric, times = dp.metrics.MeanSquaredError(), 50
    side_by_side(*[lambda number: metric.update_state(Y[:4], Y[:4] + 2.0)] * 4, times=times)
    assert float(metric.total) == 4 * times * 4
    assert float(metric.count) == 4 * times
    assert float(metric.result()) == 4


def test_random_numbers():
    """Threads that share a generator draw other numbers, which one thread would have drawn one after the other."""
    generator, alone = dp.random.SeedGenerator(7), dp.random.SeedGenerator(7)
    dropout, results = layers.Dropout(0.5, seed=3), []
    side_by_side(*[lambda number: results.append(float(dp.random.uniform((), seed=generator)))] * 4, times=20)
    assert sorted(results) == sorted(float(dp.random.uniform((), seed=alone)) for _ in range(80))
    side_by_side(*[lambda number: results.append(np.asarray(dropout(X, training=True)).tobytes())] * 4, times=10)
    assert len(set(results)) == 80 + 40


def test_samples_of_other_sizes():
    """A model whose input nobody has declared takes samples of the size that each thread has."""
    model = dp.Sequential([layers.Dense(3), layers.GlobalAveragePooling1D()], seed=1)
    model.compile("sgd", "mse", device="cpu")
    samples = [RNG.random((4, length, 5), np.float32) for length in (3, 6, 9)]
    expected = [model.predict(x, verbose=0) for x in samples]

    def action(number: int) -> None:
        close(model.predict(samples[number % 3], verbose=0), expected[number % 3])

    side_by_side(*[action] * 3, times=12)


def test_several_models_at_once():
    """Models that are made, trained and asked in threads of their own are as those of one thread."""

    def answer(seed: int) -> np.ndarray:
        model = build(seed=seed)
        model.fit(X, Y, batch_size=32, epochs=2, verbose=0)
        return model.predict(X, verbose=0)

    expected = [answer(seed) for seed in range(4)]
    side_by_side(*[lambda number, seed=seed: close(answer(seed), expected[seed]) for seed in range(4)], times=2)


@pytest.mark.sample(4)
@pytest.mark.parametrize("ending", [".keras", ".h5", ".weights.h5", ".safetensors", ".program", "get_weights"])
def test_files_beside_a_training_are_of_one_moment(ending: str, tmp_path: Path):
    """Two layers that begin and learn alike are alike in every file."""

    def twins() -> dp.Model:
        inputs = layers.Input((5,))
        heads = [layers.Dense(3, kernel_initializer=dp.initializers.GlorotUniform(seed=3))(inputs) for _ in range(2)]
        model = dp.Model(inputs, heads)
        model.compile("adam", ["mse", "mse"])
        return model

    model, reader, finished = twins(), twins(), threading.Event()
    path = tmp_path / f"model{ending}"
    model.train_on_batch(X[:16], [X[:16, :3]] * 2)

    def heads() -> Any:
        if ending == "get_weights":
            return np.split(np.concatenate([weight.ravel() for weight in model.get_weights()]), 2)
        if ending == ".program":
            model.export(path)
            return dp.saving.load_program(path, device="cpu")(X[:3])
        if ending in (".keras", ".h5"):
            model.save(path)
            return dp.models.load_model(path).predict(X[:3], verbose=0)
        model.save_weights(path)
        reader.load_weights(path)
        return reader.predict(X[:3], verbose=0)

    def trains() -> None:
        while not finished.is_set():
            model.train_on_batch(X[:16], [X[:16, :3]] * 2)

    with ThreadPoolExecutor(1) as pool:
        training = pool.submit(trains)
        try:
            for _ in range(8):
                first, second = heads()
                np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-6)
        finally:
            finished.set()
        training.result()


class Numbered(dp.utils.PyDataset):
    """Batches that say their numbers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full((4, 5), index / 6, np.float32), np.full(4, index % 3)


@pytest.mark.parametrize(
    "dataset",
    [
        Numbered(workers=2, use_multiprocessing=False),
        dp.utils.timeseries_dataset_from_array(X[:, 0], Y, 5, batch_size=16),
    ],
    ids=["PyDataset", "dataset"],
)
def test_several_trainings_and_predictions_with_one_dataset(dataset: Any):
    expected, predicted = build(), build().predict(dataset, verbose=0)
    expected.fit(dataset, epochs=2, shuffle=False, verbose=0)

    def trains(number: int) -> None:
        model = build()
        model.fit(dataset, epochs=2, shuffle=False, verbose=0)
        for actual, weight in zip(model.get_weights(), expected.get_weights(), strict=True):
            np.testing.assert_array_equal(actual, weight)

    side_by_side(trains, trains, lambda number: close(build().predict(dataset, verbose=0), predicted), times=2)
