"""An ensemble's members are the models that would be trained alone; what it predicts is theirs together."""

import re
import zipfile

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.compile import compiler
from dptrain.callbacks import BackupAndRestore, Callback, EarlyStopping
from dptrain.errors import ConfigError, DataError, DeviceMemoryError, DivergenceError, OutputError
from dptrain.sweeps.members import Member
from dptrain.train import devices

RNG = np.random.default_rng(3)
X, Y = RNG.normal(size=(70, 6)).astype(np.float32), RNG.integers(0, 3, 70)
FIT = {"epochs": 2, "batch_size": 16, "validation_split": 0.2}


def build(metrics=("accuracy",)):
    model = dp.Sequential(
        [dp.layers.Dense(5, "tanh"), dp.layers.Dropout(0.25), dp.layers.Dense(3, "softmax", kernel_regularizer="l2")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=list(metrics))
    return model


def alone(seed, *calls):
    dp.utils.set_random_seed(seed)
    try:
        model = build()
    finally:
        dp.utils.set_random_seed(0)
    for arguments in calls or (FIT,):
        model.fit(X, Y, verbose=0, **arguments)
    return model


def require_same(models, others):
    for model, other in zip(models, others, strict=True):
        for mine, their_weight in zip(model.get_weights(), other.get_weights(), strict=True):
            np.testing.assert_array_equal(mine, their_weight)


@pytest.fixture(autouse=True)
def _numpy(monkeypatch):
    monkeypatch.setenv("DPTRAIN_JIT_COMPILE", "0")


@pytest.fixture
def trained():
    ensemble = dp.Ensemble(build, seeds=3)
    ensemble.fit(X, Y, verbose=0, **FIT)
    return ensemble


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "compiled", [False, pytest.param(True, marks=pytest.mark.skipif(not compiler(), reason="c++"))]
)
def test_members_have_the_bits_of_models_alone(monkeypatch, compiled):
    """In two trainings, of which the second goes on; where steps are compiled, two threads train three members."""
    monkeypatch.setenv("DPTRAIN_JIT_COMPILE", str(int(compiled)))
    monkeypatch.setattr(devices, "limit_threads", lambda local_size: 2)
    ensemble = dp.Ensemble(build, seeds=[4, 2, 7])
    first = ensemble.fit(X, Y, verbose=0, **FIT)
    options = {"epochs": 3, "initial_epoch": 2, "shuffle": False}
    second = ensemble.fit(X, Y, verbose=0, **options)
    expected = [alone(seed, FIT, options) for seed in (4, 2, 7)]
    require_same(ensemble.members, expected)
    assert ensemble.seeds == (4, 2, 7)
    assert [member.history for member in second.members] == [history.history.history for history in expected]
    assert second.epoch == [2]
    losses = [alone(seed).history.history["val_loss"] for seed in (4, 2, 7)]
    assert [member.history["val_loss"] for member in first.members] == losses
    np.testing.assert_allclose(first.history["val_loss"], np.mean(losses, axis=0))
    ensemble.members[1].fit(X, Y, verbose=0, **FIT)  # an ordinary model
    expected[1].fit(X, Y, verbose=0, **FIT)
    require_same(ensemble.members, expected)


def attentive(layers):
    """Return a layer with dropout of its own that attends to the steps of a sequence."""
    attention = layers.MultiHeadAttention(2, 2, dropout=0.1)
    return lambda steps: attention(steps, steps, use_causal_mask=True)


@pytest.mark.skipif(not compiler(), reason="c++")
@pytest.mark.long
@pytest.mark.parametrize(
    "layer_of",
    [attentive, lambda layers: layers.Bidirectional(layers.GRU(3, return_sequences=True, recurrent_dropout=0.1))],
    ids=["attention", "recurrent"],
)
def test_members_of_masked_sequences_have_the_bits_of_members_alone(monkeypatch, layer_of):
    monkeypatch.setenv("DPTRAIN_JIT_COMPILE", "1")
    monkeypatch.setattr(devices, "limit_threads", lambda local_size: 2)
    ids = RNG.integers(1, 9, (23, 6)) * (np.arange(6) < RNG.integers(1, 7, (23, 1)))
    labels = RNG.integers(0, 3, (23, 6))

    def sequences():
        x = dp.Input((None,), dtype="int32")
        steps = layer_of(dp.layers)(dp.layers.Embedding(9, 4, mask_zero=True)(x))
        model = dp.Model(x, dp.layers.Dense(3, "softmax")(steps))
        model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
        return model

    together, *each_alone = [dp.Ensemble(sequences, seeds=seeds) for seeds in ([0, 1, 2], [0], [1], [2])]
    for ensemble in (together, *each_alone):
        ensemble.fit(ids, labels, batch_size=7, epochs=2, verbose=0)
    require_same(together.members, [ensemble.members[0] for ensemble in each_alone])


def test_predictions_are_those_of_the_members(trained):
    predictions = trained.predict(X[:9], verbose=0)
    member_predictions = [member.predict(X[:9], verbose=0) for member in trained.members]
    np.testing.assert_array_equal(predictions.members, member_predictions)
    np.testing.assert_allclose(predictions.mean, np.mean(member_predictions, axis=0), rtol=1e-6)
    np.testing.assert_allclose(predictions.std, np.std(member_predictions, axis=0), rtol=1e-4)
    assert (predictions.mean.shape, predictions.mean.dtype) == ((9, 3), np.float32)


def test_an_evaluation_is_that_of_the_mean(trained):
    weights = RNG.uniform(0.5, 2, len(X))
    mean = trained.predict(X, verbose=0).mean
    losses = -np.log(mean[np.arange(len(X)), Y])
    results = trained.evaluate(X, Y, sample_weight=weights, verbose=0, return_dict=True)
    assert results == pytest.approx({"loss": np.mean(losses * weights), "accuracy": np.mean(mean.argmax(1) == Y)})
    loss, accuracy = trained.evaluate(X, Y, verbose=0)
    assert (loss, accuracy) == pytest.approx((np.mean(losses), results["accuracy"]))


def test_an_evaluation_leaves_metrics_to_the_member_that_has_them():
    ensemble = dp.Ensemble(lambda: build([dp.metrics.SparseTopKCategoricalAccuracy(2)]), seeds=2)
    ensemble.fit(X, Y, verbose=0, **FIT)
    before, total = ensemble.members[0].evaluate(X, Y, verbose=0), ensemble.evaluate(X, Y, verbose=0)
    assert ensemble.members[0].evaluate(X, Y, verbose=0) == before
    assert ensemble.evaluate(X, Y, verbose=0) == total


def test_several_outputs():
    def two():
        x = dp.Input((6,))
        outputs = {"label": dp.layers.Dense(3, "softmax")(x), "size": dp.layers.Dense(1)(x)}
        model = dp.Model(x, outputs)
        model.compile(
            "sgd", {"label": "sparse_categorical_crossentropy", "size": "mse"}, metrics={"label": ["accuracy"]}
        )
        return model

    ensemble = dp.Ensemble(two, seeds=2)
    targets = {"label": Y, "size": X[:, :1]}
    ensemble.fit(X, targets, verbose=0, batch_size=16)
    predictions = ensemble.predict(X, verbose=0)
    assert predictions.members["label"].shape == (2, 70, 3)
    scores = ensemble.evaluate(X, targets, verbose=0, return_dict=True)
    assert scores["size_loss"] == pytest.approx(np.mean((predictions.mean["size"] - X[:, :1]) ** 2), rel=1e-5)
    assert scores.keys() == ensemble.members[0].evaluate(X, targets, verbose=0, return_dict=True).keys()


class Stop(Callback):
    """Ends a training after so many epochs."""

    def __init__(self, epochs):
        super().__init__()
        self.epochs, self.seen = epochs, []

    def on_epoch_end(self, epoch, logs=None):
        self.seen.append((self.model.seed, logs["loss"]))
        self.model.stop_training = epoch + 1 == self.epochs


def test_each_member_has_callbacks_of_its_own(capsys):
    hooks = [[Stop(epochs)] for epochs in (3, 1, 2)]
    ensemble = dp.Ensemble(build, seeds=3)
    history = ensemble.fit(X, Y, epochs=3, callbacks=hooks, verbose=2)
    assert [len(member.epoch) for member in history.members] == [3, 1, 2]
    assert [hook.seen for (hook,) in hooks] == [
        [(seed, loss) for loss in member.history["loss"]] for seed, member in enumerate(history.members)
    ]
    lines = capsys.readouterr().out.splitlines()
    assert [re.sub(r"[\d.]+ s", "_", line) for line in lines] == [
        f"Epoch {epoch}/3 - {members} member{'s' * (members > 1)} - _ - loss: {loss:.4f} - accuracy: {accuracy:.4f}"
        for epoch, members, loss, accuracy in zip(
            (1, 2, 3), (3, 2, 1), history.history["loss"], history.history["accuracy"], strict=True
        )
    ]
    stopped = dp.Ensemble(build, seeds=2).fit(
        X, Y, epochs=9, callbacks=lambda: EarlyStopping("loss", mode="max", patience=0), verbose=0
    )
    assert max(stopped.epoch) < 8


@pytest.mark.parametrize(
    ("callbacks", "message"),
    [
        ([EarlyStopping()], "a list of lists, one for each of the 2 members"),
        ([[EarlyStopping()]], "a list of lists, one for each of the 2 members"),
        ([[Stop(1)] * 2, []], "two members share a callback"),
        ([[], [BackupAndRestore("b")]], "not supported: BackupAndRestore"),
    ],
)
def test_callbacks_that_are_not_those_of_single_members(callbacks, message):
    with pytest.raises(ConfigError, match=message):
        dp.Ensemble(build, seeds=2).fit(X, Y, callbacks=callbacks, verbose=0)


class Fail(Callback):
    def on_epoch_end(self, epoch, logs=None):
        raise KeyError("logs")


def test_an_error_names_the_member_and_ends_all(trained):
    before = trained.members[0].get_weights()
    trained.members[1].set_weights([weight * np.float32(np.nan) for weight in trained.members[1].get_weights()])
    with pytest.raises(DivergenceError, match=r"^member 1 \(seed 1\): "):
        trained.fit(X, Y, verbose=0, epochs=50)
    trained.members[1].set_weights(before)
    with pytest.raises(KeyError) as error:
        trained.fit(X, Y, verbose=0, callbacks=[[], [], [Fail()]])
    assert error.value.__notes__ == ["member 2 (seed 2)"]
    assert np.isfinite(trained.predict(X, verbose=0).mean).all()  # all have left their places


@pytest.mark.long
def test_a_member_that_finds_no_memory_beside_others_is_trained_later(trained, monkeypatch):
    start, close, started, refused = Member.start, Member.close, set(), []

    def full(self, threads):
        start(self, threads)
        if len(started) >= 2:
            refused.append(self.number)
            raise DeviceMemoryError("CUDA out of memory", "activations", 10, 5, {})
        started.add(self)

    monkeypatch.setattr(Member, "start", full)
    monkeypatch.setattr(Member, "close", lambda self: (started.discard(self), close(self)))
    ensemble = dp.Ensemble(build, seeds=3)
    ensemble.fit(X, Y, verbose=0, **FIT)
    assert refused == [2]
    require_same(ensemble.members, trained.members)
    started |= {None, 0}  # others', so that one finds none alone
    with pytest.raises(DeviceMemoryError, match=r"^member 0 \(seed 0\): CUDA out of memory"):
        ensemble.fit(X, Y, verbose=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: dp.Ensemble(build, seeds=0), "seeds = 0: expected the number of members, 1 or more"),
        (lambda: dp.Ensemble(build, seeds=[1, 1]), "seeds: 1 of '?1'? appears twice"),
        (lambda: dp.Ensemble(lambda: dp.Sequential([dp.layers.Dense(1)])), "expected a compiled model"),
        (lambda: dp.Ensemble(_of_one_seed), "two members have the seed 5 and would be identical"),
    ],
)
def test_ensembles_that_are_none(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def _of_one_seed():
    model = dp.Sequential([dp.layers.Dense(1, input_shape=(2,))], seed=5)
    model.compile("sgd", "mse")
    return model


def test_data_that_only_one_member_could_read(trained):
    batches = ((X, Y) for _ in range(2))
    with pytest.raises(
        ConfigError, match="x is a generator: expected an array, which each run can read from its start"
    ):
        trained.fit(batches, verbose=0)
    with pytest.raises(ConfigError, match="predict: x is a generator"):
        trained.predict(batches, verbose=0)
    with pytest.raises(ConfigError, match="evaluate: x is a generator"):
        trained.evaluate(batches, verbose=0)


def test_a_file_of_all_members(trained, tmp_path):
    pytest.importorskip("h5py")
    path = tmp_path / "digits.zip"
    trained.save(path)
    with pytest.raises(OutputError, match="exists; pass overwrite=True"):
        trained.save(path, overwrite=False)
    with pytest.raises(ConfigError, match=r"must end in `\.zip`"):
        trained.save(tmp_path / "digits.keras")
    restored = dp.Ensemble.load(path)
    assert restored.seeds == trained.seeds
    for ensemble in (trained, restored):  # with their optimizers, and their seeds' orders
        ensemble.fit(X, Y, verbose=0, epochs=3, initial_epoch=2)
    require_same(restored.members, trained.members)
    zipfile.ZipFile(path).extract("member-2.keras", tmp_path)
    model = dp.models.load_model(tmp_path / "member-2.keras")
    require_same([model], [dp.Ensemble.load(path).members[2]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["digits.zip", "member-2.keras"]
    with pytest.raises(DataError, match=r"digits2\.zip: not found"):
        dp.Ensemble.load(tmp_path / "digits2.zip")
    (tmp_path / "member-2.keras").rename(tmp_path / "models.zip")
    with pytest.raises(DataError, match=r"models\.zip: no ensemble\.json in the archive"):
        dp.Ensemble.load(tmp_path / "models.zip")
    for position in range(40, path.stat().st_size, path.stat().st_size // 7):
        (tmp_path / "cut.zip").write_bytes(path.read_bytes()[:position])
        with pytest.raises(DataError, match=r"cut\.zip"):
            dp.Ensemble.load(tmp_path / "cut.zip")
