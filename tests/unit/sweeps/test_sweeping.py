"""Sweeps as a whole, on one process: what is trained, what becomes of runs that fail, what a continued sweep does."""

import functools
import json
import math
import os
import signal
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import dptrain as dp
from dptrain.data.holdout import fold_rows
from dptrain.errors import AgreedError, ConfigError, DataError, DeviceMemoryError, OutputError
from dptrain.sweeps.api import _Recipe
from dptrain.sweeps.records import Run, Segment, Status
from dptrain.sweeps.scheduling import capacity, worker
from dptrain.sweeps.scheduling.training import Slot, Training
from dptrain.sweeps.space import Space
from tests.sample import sample

RNG = np.random.default_rng(5)
X, Y = RNG.normal(size=(70, 6)).astype(np.float32), RNG.integers(0, 3, 70)
XV, YV = RNG.normal(size=(20, 6)).astype(np.float32), RNG.integers(0, 3, 20)
FIT = {"epochs": 3, "batch_size": 16, "validation_data": (XV, YV)}


def build(units=4, learning_rate=0.01, dropout=0.25):
    model = dp.Sequential(
        [dp.layers.Dense(units, "tanh", input_shape=(6,)), dp.layers.Dropout(dropout), dp.layers.Dense(3, "softmax")]
    )
    model.compile(dp.optimizers.Adam(learning_rate), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def sweep(space, build_model=build, **options):
    return dp.sweep(build_model, space, **{"seeds": "0-2", "x": X, "y": Y, "verbose": 0} | FIT | options)


@functools.cache
def alone(seed, epochs=FIT["epochs"], **setting):
    """Return what each epoch of a run logs that is no part of a sweep."""
    dp.utils.set_random_seed(seed)
    try:
        model = build(**setting)
    finally:
        dp.utils.set_random_seed(0)
    history = model.fit(X, Y, verbose=0, **FIT | {"epochs": epochs}).history
    return [{key: values[epoch] for key, values in history.items()} for epoch in range(epochs)]


def epochs_of(path, run):
    lines = [json.loads(line) for line in (path / "results.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in record.items() if k not in ("trial", "run", "seed", "epoch", "digest")}
        for record in lines
        if record["run"] == run
    ]


@pytest.mark.parametrize("places", sample([1, 4], 2, first=1))
def test_a_run_has_the_bits_of_the_same_run_alone(tmp_path, places):
    result = sweep({"units": [4, 5], "learning_rate": [0.01, 0.1]}, out=tmp_path / "s", runs_per_device=places)
    assert [run["run"] for run in result.runs] == list(range(12))
    assert [run["seed"] for run in result.runs] == [0, 1, 2] * 4
    for run in result.runs:
        expected = alone(run["seed"], units=run["units"], learning_rate=run["learning_rate"])
        epochs = epochs_of(tmp_path / "s", run["run"])
        assert epochs == expected
        assert run["metrics"] == epochs[-1]
        assert (run["status"], run["epochs_trained"], run["reason"]) == ("done", 3, "")
    values = [run["metrics"]["val_loss"] for run in result.runs if run["trial"] == 2]
    assert result.metric == "val_loss"
    assert result.mode == "min"
    assert result.trials[2]["mean"] == pytest.approx(np.mean(values))
    assert result.trials[2]["std"] == pytest.approx(np.std(values, ddof=1))
    assert result.best == min(result.trials, key=lambda trial: trial["mean"])
    assert result.exit_code == 0
    assert {"trials.csv", "report.html", "results.jsonl"} <= {file.name for file in (tmp_path / "s").iterdir()}


def test_runs_are_trained_a_step_each_in_turn(monkeypatch):
    order = []
    advance = Training.advance
    monkeypatch.setattr(Training, "advance", lambda self: (order.append(self.segment.run.number), advance(self))[1])
    monkeypatch.setattr(capacity, "_steps_per_second", lambda schedule, trainings: 1.0)
    sweep({"units": [4]}, runs_per_device=3)
    assert order[1:10] == [0, 1, 2] * 3  # the first is the measurement's


def test_halving_stops_trials_and_changes_no_bit_of_the_others(tmp_path):
    rates = [0.1, 1e-6, 0.01, 1e-5, 1e-4, 1e-3]
    result = sweep({"learning_rate": rates}, seeds="0-1", out=tmp_path / "s", halving=2, runs_per_device=2, epochs=5)
    trained = {trial["trial"]: trial["epochs_trained"] for trial in result.trials}
    assert sorted(trained.values())[-1] == 5
    assert list(trained.values()).count(1) >= 2
    assert result.best["epochs_trained"] == 5
    for run in result.runs:
        expected = alone(run["seed"], epochs=5, learning_rate=run["learning_rate"])
        epochs = epochs_of(tmp_path / "s", run["run"])
        assert len(epochs) == run["epochs_trained"] == trained[run["trial"]]
        assert epochs == expected[: len(epochs)]
        assert run["status"] == ("done" if run["epochs_trained"] == 5 else "pruned")
    best = [f"{run['run']}-5" for run in result.runs if run["trial"] == result.best["trial"]]
    assert sorted(file.stem for file in (tmp_path / "s" / "states").iterdir()) == sorted(best)


def test_what_diverges_or_fails_does_not_end_the_sweep(tmp_path):
    def build_or_fail(learning_rate):
        if learning_rate == 0.5:
            raise ZeroDivisionError("no such model")
        model = build(learning_rate=0.01)
        if learning_rate == 1.0:
            model.set_weights([weight * np.float32(np.nan) for weight in model.get_weights()])
        return model

    result = sweep({"learning_rate": [0.1, 0.5, 1.0, 0.2]}, build_or_fail, seeds=[7], runs_per_device=2)
    assert [run["status"] for run in result.runs] == ["done", "failed", "diverged", "done"]
    assert result.runs[1]["reason"].startswith("ZeroDivisionError: no such model (test_sweeping.py:")
    assert "diverged" in result.runs[2]["reason"]
    assert (result.runs[1]["epochs_trained"], result.runs[2]["epochs_trained"]) == (0, 0)
    assert result.exit_code == 70  # the first that failed
    assert result.trials[1]["n"] == result.trials[2]["n"] == 0
    assert result.trials[1]["failed"] == 1
    assert set(result.ranking[:2]) == {0, 3}


def test_a_continued_sweep_repeats_nothing(tmp_path, monkeypatch):
    first = sweep({"units": [4, 5]}, out=tmp_path / "s")
    monkeypatch.setattr(worker.Worker, "start", None)
    assert sweep({"units": [4, 5]}, out=tmp_path / "s") == first
    with pytest.raises(AgreedError, match=r"space\.grid\.units\[1\]: 5 there, 6 here"):
        sweep({"units": [4, 6]}, out=tmp_path / "s")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("mine")
    with pytest.raises(AgreedError, match="contains no sweep") as error:
        sweep({"units": [4]}, out=tmp_path / "other")
    assert error.value.exit_code == OutputError.exit_code


def test_a_sweep_that_was_interrupted_goes_on(tmp_path, monkeypatch):
    """Runs that had ended stay, the others are trained again, with the same results."""
    complete = sweep({"units": [4, 5]}, out=tmp_path / "whole")
    report = worker.Worker._report
    epochs = []

    def interrupt(self, run, epoch, logs):
        report(self, run, epoch, logs)
        epochs.append(epoch)
        if len(epochs) == 11:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_report", interrupt)
        with pytest.raises(KeyboardInterrupt):
            sweep({"units": [4, 5]}, out=tmp_path / "s", runs_per_device=2)
    assert dp.rank() == 0
    so_far = (tmp_path / "s" / "trials.csv").read_text().splitlines()
    assert [row.split(",")[:3] for row in so_far] == [["trial", "units", "n"], ["0", "4", "2"], ["1", "5", "0"]]
    assert "2 done" in (tmp_path / "s" / "report.html").read_text()
    repeated_epochs = []
    start = worker.Worker.start
    monkeypatch.setattr(
        worker.Worker, "start", lambda self, *a: (repeated_epochs.append(a[0].run.number), start(self, *a))[1]
    )
    result = sweep({"units": [4, 5]}, out=tmp_path / "s")
    assert repeated_epochs == [2, 3, 4, 5]
    for run, other in zip(result.runs, complete.runs, strict=True):
        assert {**run, "seconds": 0} == {**other, "seconds": 0}
    assert sorted((tmp_path / "s" / "results.jsonl").read_text().splitlines()) == sorted(
        (tmp_path / "whole" / "results.jsonl").read_text().splitlines()
    )


def test_a_run_that_finds_no_memory_beside_others_is_trained_later(monkeypatch, capsys):
    active = []
    init, close = Training.__init__, Training.close

    def full(self, *arguments):
        if len(active) >= 2:
            raise DeviceMemoryError("CUDA out of memory", "activations", 10, 5, {})
        init(self, *arguments)
        active.append(self)

    monkeypatch.setattr(Training, "__init__", full)
    monkeypatch.setattr(Training, "close", lambda self: (active.remove(self), close(self))[1])
    result = sweep({"units": [4, 5]}, runs_per_device=4, verbose=2)
    assert [run["status"] for run in result.runs] == ["done"] * 6
    assert "rank 0: no memory for more than 2 runs at a time" in capsys.readouterr().out


def test_a_run_that_finds_no_memory_alone_has_failed(monkeypatch):
    start = worker.Worker.start
    init = Training.__init__

    def full(self, *arguments):
        raise DeviceMemoryError("CUDA out of memory", "activations", 10, 5, {})

    def begin(self, *arguments):
        with monkeypatch.context() as patch:
            patch.setattr(Training, "__init__", full if arguments[0].run.number == 1 else init)
            start(self, *arguments)

    monkeypatch.setattr(worker.Worker, "start", begin)
    result = sweep({"units": [4]})
    assert [run["status"] for run in result.runs] == ["done", "failed", "done"]
    assert result.exit_code == 69


def test_optuna_chooses_settings_by_the_means(tmp_path):
    options = {"adaptive": 4, "seeds": [1, 2], "out": tmp_path / "s", "search_seed": 3}
    result = sweep({"learning_rate": "log:1e-4..1e-1", "units": "4,5"}, **options)
    assert len(result.trials) == 4
    assert len(result.runs) == 8
    assert len({trial["learning_rate"] for trial in result.trials}) == 4
    assert all(1e-4 <= trial["learning_rate"] <= 0.1 for trial in result.trials)
    assert sweep({"learning_rate": "log:1e-4..1e-1", "units": "4,5"}, **options) == result


def test_numpys_random_numbers_follow_the_seed_while_a_model_is_built():
    draws = []

    def with_own_weights(seed):
        draws.append(np.random.rand())
        return build()

    np.random.seed(5)
    expected = np.random.RandomState(5).rand()
    sweep({}, with_own_weights, seeds=[3, 4])
    assert draws[-2:] == [np.random.RandomState(seed).rand() for seed in (3, 4)]
    assert np.random.rand() == expected


def test_fields_go_to_build_model_or_to_fit():
    def steps_of(**options):
        return [len(run["metrics"]) for run in sweep({"batch_size": [8, 35], "epochs": [1, 2]}, **options).runs]

    assert len(steps_of(seeds=[0])) == 4
    result = sweep({"batch_size": [8, 35], "epochs": [1, 2]}, seeds=[0])
    assert [run["epochs_trained"] for run in result.runs] == [1, 2, 1, 2]
    settings = []

    def with_anything(seed, **values):
        settings.append((seed, values))
        return build()

    sweep({"units": [1], "batch_size": [8]}, with_anything, seeds=[4])
    assert {(seed, tuple(values)) for seed, values in settings} == {(4, ("units",))}
    for options, message in (
        ({"space": {"n": [1]}}, "swept 'n': results already have a column of that name"),
        ({"space": {"unitz": [1]}}, "swept 'unitz' is a parameter of neither build_model nor fit"),
        ({"batchsize": 3}, "'batchsize' is neither an argument of sweep"),
        ({"initial_epoch": 3}, "'initial_epoch' is neither an argument of sweep"),
        ({"metric": "val_acuracy"}, "metric = 'val_acuracy': expected one of loss, accuracy"),
        ({"mode": "best"}, "mode = 'best'"),
        ({"halving": 3, "callbacks": list}, "callbacks with halving"),
        ({"halving": 3, "space": {"epochs": [1, 2]}}, "halving: not supported when epochs are swept"),
        ({"build_model": lambda units: 3}, "build_model: expected a compiled model, found int"),
        ({"build_model": lambda units: dp.Sequential()}, "build_model: expected a compiled model"),
    ):
        with pytest.raises(ConfigError, match=message):
            sweep(**{"space": {"units": [4]}} | options)


def test_callbacks_are_made_for_every_run():
    class StopAfterTwo(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            self.model.stop_training = epoch == 1

    created = []

    def callbacks():
        created.append(StopAfterTwo())
        return [created[-1]]

    result = sweep({"units": [4]}, callbacks=callbacks)
    assert len(created) == 4  # one is the measurement's
    assert [(run["status"], run["epochs_trained"]) for run in result.runs] == [("done", 2)] * 3


def test_metrics_that_are_not_numbers(tmp_path):
    """A metric of one run is NaN: it has no value, and the files stay JSON."""

    class Odd(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if self.model.seed == 1:
                logs["val_accuracy"] = math.nan

    result = sweep({"units": [4]}, callbacks=lambda: [Odd()], metric="val_accuracy", out=tmp_path / "s")
    assert "NaN" not in (tmp_path / "s" / "results.jsonl").read_text()
    assert result.trials[0]["n"] == 2
    assert result.trials[0]["failed"] == 1


def test_the_frame_of_runs():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = sweep({"units": [4, 5]}).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert len(frame) == 6
    assert {"units", "seed", "val_loss", "status"} <= set(frame.columns)


def test_memory_is_given_back_when_a_run_ends():
    recipe = _Recipe(build, Space(grid={"units": [4]}), X, Y, None, FIT)
    training = Training(recipe, Segment(Run(0, 0, 1)), {"units": 4}, Slot(), b"", lambda *reports: None)
    while (ended := training.advance()) is None:
        pass
    programs = training.trainer.programs
    assert programs.nbytes > 0
    assert ended[0].status is Status.DONE
    variables = training.model._variables_on_device()
    storages = {variable.storage for variable in variables}
    assert None not in storages
    training.close()
    assert programs.nbytes == 0
    for storage in storages:
        assert all(variable not in storage._arrays for variable in variables)


def test_runs_of_which_some_diverge_at_once_or_make_no_model():
    """Neither ends the sweep before it begins, whatever settings come first."""

    class Nothing(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            raise ValueError("mine")

    def build_or_fail(units):
        if units < 9:
            raise ValueError("too small")
        return build(units)

    result = sweep({"units": range(3, 10)}, build_or_fail, seeds=[0])
    assert [run["status"] for run in result.runs] == ["failed"] * 6 + ["done"]
    result = sweep({"learning_rate": [1e37, 1e38]}, diverging, seeds=[0, 1], epochs=9)
    assert [run["status"] for run in result.runs] == ["diverged"] * 4
    assert result.best is None
    assert result.exit_code == 76
    result = sweep({"units": [4]}, callbacks=lambda: [Nothing()], seeds=[0])
    assert result.runs[0]["reason"].startswith("ValueError: mine")


def diverging(learning_rate):
    model = dp.Sequential([dp.layers.Dense(4, input_shape=(6,)), dp.layers.Dense(3)])
    model.compile(dp.optimizers.SGD(learning_rate), dp.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"x": iter([(X, Y)]), "y": None}, "x is a list_iterator: expected an array"),
        ({"x": "abc"}, "x is a str: expected an array"),
        (
            {"callbacks": [dp.callbacks.Callback()]},
            "callbacks: expected a function, which is called for each run, found list",
        ),
        ({"build_model": 3}, "build_model: expected a function, which is called for each run, found int"),
        ({"halving": "three"}, "halving = 'three': must be a valid integer"),
        ({"runs_per_device": 0}, "runs_per_device = 0: must be greater than or equal to 1"),
        ({"adaptive": 2.5}, "adaptive = 2.5: must be a valid integer"),
        ({"epochs": "2"}, "epochs = '2': expected an integer >= 0"),
        ({"verbose": "loud"}, "verbose = 'loud'"),
        ({"metric": "val_loss", "validation_data": None}, "there is no validation data; pass validation_data"),
        ({"metric": ["loss", "val_loss"], "validation_data": None}, "metric = 'val_loss': there is no validation"),
        ({"metric": ["loss", "val_acuracy"]}, "metric = 'val_acuracy': expected one of loss, accuracy"),
        ({"metric": ["loss", "seconds"], "mode": ["min", "low"]}, "mode = 'low': must be 'auto', 'max' or 'min'"),
        ({"metric": ["loss", "seconds"], "halving": 2}, "halving: compares trials by one metric"),
    ],
)
def test_wrong_arguments(wrong, message):
    with pytest.raises(ConfigError, match=message):
        sweep(**{"space": {"units": [4]}} | wrong)


@pytest.mark.long
def test_several_metrics_make_a_front_and_one_changes_no_journal(tmp_path):
    metrics = ["val_accuracy", "parameters", "seconds"]
    several, single = tmp_path / "several", tmp_path / "one"
    result = sweep({"units": [2, 4, 8]}, metric=metrics, out=several)
    assert result.modes == {"val_accuracy": "max", "parameters": "min", "seconds": "min"}
    assert [trial["mean_parameters"] for trial in result.trials] == [23, 43, 83]
    for trial in result.trials:
        seconds = [run["seconds"] for run in result.runs if run["trial"] == trial["trial"]]
        assert trial["mean_seconds"] == pytest.approx(np.mean(seconds))
    assert 0 in result.front  # no other model is as small
    assert result.front == [number for number in result.ranking if result.trials[number]["pareto"]]
    assert [
        finding for finding in result.findings if finding.startswith("Pareto front of val_accuracy (more is better), ")
    ]
    # Continued, nothing is left to do; with other metrics it is another sweep.
    assert sweep({"units": [2, 4, 8]}, metric=metrics, out=several).trials == result.trials
    with pytest.raises(AgreedError, match=r"holds another sweep: metric"):
        sweep({"units": [2, 4, 8]}, metric=metrics[:2], out=several)
    alone = sweep({"units": [2]}, metric=["val_accuracy"], out=single)
    assert (alone.front, alone.modes) == ([], {"val_accuracy": "max"})
    assert sweep({"units": [2]}, metric="val_accuracy", out=single).trials == alone.trials
    assert set(alone.runs[0]["metrics"]) == {"loss", "accuracy", "val_loss", "val_accuracy"}
    assert not {"pareto", "mean_parameters"} & set(alone.trials[0])


def test_a_single_metric_may_be_none_of_the_logs():
    result = sweep({"units": [4, 2]}, metric="parameters", seeds=[0])
    assert ([trial["mean"] for trial in result.trials], result.ranking) == ([43, 23], [1, 0])


def test_a_model_that_is_no_new_one_is_refused():
    model = build()
    with pytest.raises(ConfigError, match="returned the same model twice"):
        sweep({"units": [4, 5]}, lambda units: model, runs_per_device=2)


@pytest.mark.parametrize(
    "other",
    [{"validation_data": (XV + 1, YV)}, {"class_weight": {0: 2.0, 1: 1.0, 2: 1.0}}, {"sample_weight": np.ones(70)}],
)
def test_other_data_are_another_sweep(tmp_path, other):
    sweep({"units": [4]}, out=tmp_path / "s", seeds=[0])
    with pytest.raises(AgreedError, match=r"holds another sweep: fit\."):
        sweep({"units": [4]}, out=tmp_path / "s", seeds=[0], **other)


def test_what_callbacks_add_to_the_logs_may_be_no_number():
    class Note(dp.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            logs["note"], logs["rows"], logs["one"] = "fine", np.ones(3), np.float32(1)

    result = sweep({"units": [4]}, callbacks=lambda: [Note()], seeds=[0])
    assert result.exit_code == 0
    assert "note" not in result.runs[0]["metrics"]
    assert result.runs[0]["metrics"]["one"] == 1


@pytest.mark.parametrize(
    ("file", "before", "after"),
    [
        ("journal.jsonl", '"seed": 1', '"seed": 7'),
        ("journal.jsonl", '"units": 5', '"units": 6'),
        ("journal.jsonl", '"loss": ', '"loss": "high", "was": '),
        ("results.jsonl", '"loss": ', '"loss": "high", "was": '),
    ],
)
def test_what_somebody_else_has_written_is_never_taken_for_a_result(tmp_path, file, before, after):
    sweep({"units": [4, 5]}, out=tmp_path / "s", seeds=[0, 1])
    path = tmp_path / "s" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    with pytest.raises(AgreedError) as error:
        sweep({"units": [4, 5]}, out=tmp_path / "s", seeds=[0, 1])
    assert error.value.exit_code == DataError.exit_code


def test_the_last_validation_counts(tmp_path):
    result = sweep({"units": [4]}, validation_freq=2, epochs=3, out=tmp_path / "s")
    for run in result.runs:
        first, second, third = epochs_of(tmp_path / "s", run["run"])
        assert "val_loss" not in first
        assert "val_loss" not in third
        assert run["metrics"] == {**second, **third}
    assert result.trials[0]["n"] == 3


def test_an_ending_claims_no_epoch_that_was_not_reported(monkeypatch):
    """The second epoch of one run cannot be told: the run has failed after the first, the sweep goes on."""
    report = worker.Worker._report

    def fail(self, run, epoch, logs):
        if (run.number, epoch) == (1, 2):
            raise RuntimeError("cannot be told")
        report(self, run, epoch, logs)

    monkeypatch.setattr(worker.Worker, "_report", fail)
    result = sweep({"units": [4]})
    assert [(run["status"], run["epochs_trained"]) for run in result.runs] == [("done", 3), ("failed", 1), ("done", 3)]
    assert "cannot be told" in result.runs[1]["reason"]


def folded_alone(fold, seed, **setting):
    """Return the history of a fold of three, trained alone."""
    rows, test_rows = fold_rows(Y, fold, 3, seed)
    dp.utils.set_random_seed(seed)
    try:
        model = build(**setting)
    finally:
        dp.utils.set_random_seed(0)
    options = {"epochs": 3, "batch_size": 16, "validation_data": (X[test_rows], Y[test_rows]), "verbose": 0}
    return model.fit(X[rows], Y[rows], **options).history, model.evaluate(XV, YV, verbose=0, return_dict=True)


@pytest.mark.long
def test_cross_validation_and_what_the_best_trial_makes_of_the_test_set(tmp_path, monkeypatch):
    pytest.importorskip("h5py", reason="models need the extra 'keras-files'")
    evaluated = []
    test = _Recipe.test
    monkeypatch.setattr(_Recipe, "test", lambda self, model: (evaluated.append(model), test(self, model))[1])

    def go(**options):
        space = {"units": [4, 5], "learning_rate": [0.05]}
        cross_validation = {
            "seeds": [3, 8],
            "folds": 3,
            "validation_data": None,
            "test_data": (XV, YV),
            "metric": "val_accuracy",
        }
        return dp.sweep(build, space, x=X, y=Y, epochs=3, batch_size=16, verbose=0, **{
            name: value for name, value in cross_validation.items() if value is not None
        }, **options)  # fmt: skip

    result = go(out=tmp_path / "s")
    assert [(run["seed"], run["fold"]) for run in result.runs] == [(s, f) for s in (3, 8) for f in range(3)] * 2
    tested = {3: [], 8: []}
    for run in result.runs:
        history, scores = folded_alone(run["fold"], run["seed"], units=run["units"], learning_rate=0.05)
        assert run["metrics"] == {key: values[-1] for key, values in history.items()}
        if run["trial"] == result.best["trial"]:
            tested[run["seed"]].append(scores["accuracy"])
    assert result.best["n"] == 6
    assert (result.test["metric"], result.test["n"]) == ("accuracy", 2)
    assert result.test["mean"] == pytest.approx(np.mean([np.mean(values) for values in tested.values()]))
    assert len(evaluated) == 6  # the best trial's models, each once
    assert any(
        sentence.startswith("On the test set, which was not used to choose anything, ") for sentence in result.findings
    )
    assert len(result.models) == 6
    model = dp.models.load_model(tmp_path / "s" / result.models[0])
    best = result.best["trial"]
    assert result.models[0] == f"models/trial-{best}-seed-3-fold-1.keras"
    assert model.evaluate(XV, YV, verbose=0, return_dict=True)["accuracy"] == pytest.approx(tested[3][0])
    (tmp_path / "s" / "models" / ".trial-0-seed-3-fold-1.keras.99.tmp").write_bytes(b"PK")  # of a kill
    assert go(out=tmp_path / "s") == result
    assert {f"models/{file.name}" for file in (tmp_path / "s" / "models").iterdir()} == set(result.models)
    assert len(evaluated) == 6
    assert go(keep="none").test == result.test


@pytest.mark.long
def test_the_interval_on_the_test_set_has_the_chance_of_seeds_and_of_samples(tmp_path):
    """Every seed is right on every one of 36 samples, which is no certainty; errors are drawn anew from the samples."""
    x = np.linspace(-1, 1, 96, dtype=np.float32)[:, None]
    x[np.abs(x) < 0.2] = 0.5
    held_out, test = (x[1::3], (x[1::3, 0] > 0) * 1), (x[:36], (x[:36, 0] > 0) * 1)

    def line(loss, metric, activation):
        model = dp.Sequential([dp.layers.Dense(1, activation, input_shape=(1,), kernel_initializer="ones")])
        model.compile(dp.optimizers.SGD(0.1), loss, metrics=[metric])
        return model

    common = {"seeds": "0-3", "x": x, "y": (x[:, 0] > 0) * 1, "epochs": 2, "verbose": 0, "test_data": test}
    common |= {"validation_data": held_out, "out": tmp_path / "s"}
    result = dp.sweep(lambda: line("binary_crossentropy", "accuracy", "sigmoid"), {}, metric="val_accuracy", **common)
    assert (result.test["mean"], result.test["ci_high"], result.test["covers"]) == (1, 1, "seeds and samples")
    assert 0.85 < result.test["ci_low"] < 0.92
    findings = " ".join(result.findings)
    assert "is 1 (95 % interval 0.89746 to 1 over seeds and samples, n = 4 seeds and 36 samples)" in findings
    assert "1 to 1" not in findings + (tmp_path / "s" / "report.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert result.best["ci_low"] < result.best["ci_high"] == 1

    y = x[:, 0] + RNG.normal(0, 0.3, len(x)).astype(np.float32)
    common |= {"y": y, "validation_data": (held_out[0], y[1::3]), "test_data": (test[0], y[:36]), "out": tmp_path / "t"}
    fixed = dp.sweep(lambda: line("mse", "mae", None), {}, metric="val_mae", **common)
    assert fixed.test["covers"] == "seeds and samples"
    errors = np.abs(y[:36, None] - dp.models.load_model(tmp_path / "t" / fixed.models[0]).predict(test[0], verbose=0))
    half = 2.03 * errors.std(ddof=1) / 6  # of the samples' mean, as the seeds hardly differ
    assert fixed.test["ci_high"] - fixed.test["ci_low"] == pytest.approx(2 * half, rel=0.25)
    assert dp.sweep(lambda: line("mse", "mae", None), {}, metric="val_mae", **common).test == fixed.test


def comparable(result):
    """Return what of a result does not depend on the order in which runs came up, nor on the clock."""
    runs = [{**run, "seconds": 0, "run": 0, "trial": 0} for run in result.runs]
    return sorted(map(repr, runs))


@pytest.mark.long
@pytest.mark.parametrize("keep", sample(["all", "none"], 2))
def test_a_finished_sweep_grows(tmp_path, monkeypatch, keep):
    """More seeds, values, draws and epochs: only what is missing is trained, with the bits of one sweep."""
    if keep == "all":
        pytest.importorskip("h5py", reason="models need the extra 'keras-files'")
    started = []
    start = worker.Worker.start
    monkeypatch.setattr(worker.Worker, "start", lambda self, *a: (started.append(a[0]), start(self, *a))[1])
    draws = {"learning_rate": "log:1e-3..1e-1"}
    out, common = tmp_path / "s", {"keep": keep, "runs_per_device": 2}
    sweep({"units": [4], **draws}, seeds=[0], samples=1, epochs=2, out=out, **common)
    started.clear()
    sweep({"units": [4], **draws}, seeds=[0, 1], samples=2, epochs=2, out=out, **common)
    assert sorted(segment.run.seed for segment in started) == [0, 1, 1]
    started.clear()
    sweep({"units": [5, 4], **draws}, seeds=[0, 1], samples=2, epochs=2, out=out, **common)
    assert len(started) == 4
    started.clear()
    last = sweep({"units": [5, 4], **draws}, seeds=[1, 0], samples=2, epochs=4, out=out, **common)
    assert [segment.begin for segment in started] == [2 if keep == "all" else 0] * 8
    complete = sweep({"units": [5, 4], **draws}, seeds=[0, 1], samples=2, epochs=4, out=tmp_path / "whole", **common)
    assert comparable(last) == comparable(complete)
    assert last.best["mean"] == complete.best["mean"]
    assert len(last.models) == (8 if keep == "all" else 0)
    with pytest.raises(AgreedError, match=r"fit\.batch_size: 16 there, 8 here"):
        sweep({"units": [5, 4], **draws}, seeds=[0, 1], samples=2, epochs=4, batch_size=8, out=out, **common)


@pytest.mark.long
def test_halving_grows_by_seeds_and_settings_but_not_by_epochs(tmp_path):
    options = {"halving": 2, "epochs": 4, "out": tmp_path / "s"}
    first = sweep({"learning_rate": [0.1, 1e-6, 0.01]}, seeds=[0], **options)
    grown = sweep({"learning_rate": [0.1, 1e-6, 0.01, 1e-5]}, seeds=[0, 1], **options)
    assert len(grown.runs) == 8
    assert {run["status"] for run in grown.runs} == {"done", "pruned"}
    assert grown.best["epochs_trained"] == 4
    before = {run["run"]: run for run in first.runs}
    assert [run for run in grown.runs if run["run"] in before and run["status"] == "done"] == [
        run for run in first.runs if run["status"] == "done"
    ]
    with pytest.raises(AgreedError, match="with halving, the number of epochs cannot grow"):
        sweep({"learning_rate": [0.1, 1e-6, 0.01, 1e-5]}, seeds=[0, 1], **options | {"epochs": 5})


def test_a_sweep_whose_time_is_over_says_what_there_is_and_goes_on(tmp_path):
    stopped = sweep({"units": [4, 5]}, out=tmp_path / "s", max_time=0)
    assert (stopped.runs, stopped.stopped, stopped.exit_code) == ([], "the time limit is reached", 75)
    assert (tmp_path / "s" / "report.html").exists()
    complete = sweep({"units": [4, 5]}, out=tmp_path / "s")
    assert (len(complete.runs), complete.stopped, complete.exit_code) == (6, "", 0)


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_a_signal_ends_a_sweep_with_what_there_is(tmp_path, monkeypatch, capsys, number, error):
    report = worker.Worker._report
    epochs = []

    def interrupt(self, run, epoch, logs):
        report(self, run, epoch, logs)
        epochs.append(epoch)
        if len(epochs) == 7:
            os.kill(os.getpid(), number)

    with monkeypatch.context() as patch:
        patch.setattr(worker.Worker, "_report", interrupt)
        with pytest.raises(error) as caught:
            sweep({"units": [4, 5]}, out=tmp_path / "s", runs_per_device=1)
    if error is SystemExit:
        assert caught.value.code == 75
    assert f"start again with out='{tmp_path / 's'}' to continue" in capsys.readouterr().err
    rows = (tmp_path / "s" / "trials.csv").read_text().splitlines()
    assert rows[1].split(",")[2] == "2"
    assert "The sweep is incomplete" in (tmp_path / "s" / "report.html").read_text()
    assert [run["status"] for run in sweep({"units": [4, 5]}, out=tmp_path / "s").runs] == ["done"] * 6


def test_sweeps_of_several_threads_do_not_meet(tmp_path):
    seeds = ["0-1", "2-3"]
    with ThreadPoolExecutor(2) as pool:
        results = [pool.submit(sweep, {"units": [4]}, seeds=name, out=tmp_path / name) for name in seeds]
        runs = [run for result in results for run in result.result(60).runs]
    assert [run["seed"] for run in runs] == [0, 1, 2, 3]
    for run, folder in zip(runs, np.repeat(seeds, 2), strict=True):
        assert epochs_of(tmp_path / folder, run["run"]) == alone(run["seed"], units=4)
