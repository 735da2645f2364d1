"""A profile has every kernel of the measured steps, with its layers, and changes no bit."""

import itertools
import json

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cpu.compile import compiler
from dptrain.callbacks import Profiler
from dptrain.errors import ConfigError, OutputError
from dptrain.program.schedule.clock import Clock, Span
from dptrain.program.schedule.description import KernelDescription
from dptrain.program.schedule.profile import events_of, profile_of

BACKENDS = [pytest.param(True, marks=pytest.mark.skipif(compiler() is None, reason="no C++ compiler")), False]
X = np.random.default_rng(0).normal(size=(48, 6, 5)).astype("f4")
Y = np.arange(48) % 3


def recurrent():
    return [dp.layers.LSTM(4, name="lstm"), dp.layers.Dense(3, name="dense")]


def on_host():
    """An op that compiled code leaves to NumPy."""
    return [
        dp.layers.Lambda(lambda x: dp.ops.linalg.inv(x[:, :5] + 9 * np.eye(5, dtype="f4")), name="inverse"),
        dp.layers.Flatten(),
        dp.layers.Dense(3, name="dense"),
    ]


def plain():
    return [
        dp.layers.Flatten(),
        dp.layers.Dense(70, "relu", name="first"),
        dp.layers.LayerNormalization(name="norm"),
        dp.layers.Dense(3, name="dense"),
    ]


def trained(layers, jit, callbacks, **options):
    dp.utils.set_random_seed(1)
    model = dp.Sequential([dp.Input((6, 5)), *layers()])
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, jit_compile=jit, device="cpu", **options)
    fit = {"batch_size": 8, "epochs": 2, "verbose": 0, "callbacks": callbacks}
    return model.fit(X, Y, **fit).history["loss"], model.get_weights()


@pytest.mark.parametrize("jit", BACKENDS)
@pytest.mark.parametrize(("layers", "names"), [(plain, {"first", "norm", "dense"}), (recurrent, {"lstm", "dense"})])
def test_every_kernel_has_its_layers_and_no_bit_changes(jit, layers, names, tmp_path, capsys):
    profiler = Profiler(3, tmp_path / "trace.json")
    losses, weights = trained(layers, jit, [profiler])
    expected, expected_weights = trained(layers, jit, [])
    assert losses == expected
    for weight, expected_weight in zip(weights, expected_weights, strict=True):
        np.testing.assert_array_equal(weight, expected_weight)
    profile = profiler.profile
    assert {"data", "loss", "update"} | names <= set(profile.layers)
    assert len(profile.seconds) == 3
    kernels = sum(each.seconds for each in profile.kernels)
    assert kernels + profile.between == pytest.approx(profile.mean)
    assert kernels > 0.9 * profile.mean  # nothing runs between them
    assert sum(profile.layers.values()) == pytest.approx(kernels)
    printed = capsys.readouterr().out
    assert "profile: 3 steps of" in printed
    assert all(f"\n{name} " in printed for name in names)


@pytest.mark.parametrize("jit", BACKENDS)
def test_what_numpy_computes_within_compiled_code_is_measured(jit, tmp_path):
    profiler = Profiler(2, None)
    trained(on_host, jit, [profiler])
    profile = profiler.profile
    inverse = next(each for each in profile.kernels if "inv" in each.kernel.label)
    assert inverse.times == 1
    assert inverse.seconds > 0
    assert profile.layers["inverse"] >= inverse.seconds / 2


def test_the_trace_is_of_all_steps_in_order(tmp_path):
    path = tmp_path / "trace.json"
    trained(plain, False, [Profiler(2, path)])
    events = json.loads(path.read_text())["traceEvents"]
    assert {event["ph"] for event in events} == {"M", "X"}
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in spans} == {1, 2}
    for before, after in itertools.pairwise(spans):
        assert before["dur"] >= 0
        assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    assert {event["pid"] for event in events} == {0}
    assert any(event["args"]["layers"] == "first" and event["args"]["operations"] > 0 for event in spans)


@pytest.mark.parametrize("steps", [1, 4, 5, 6, 100])
def test_an_epoch_may_have_fewer_steps(steps):
    profiler = Profiler(steps, None)
    trained(plain, False, [profiler])
    assert len(profiler.profile.seconds) == min(steps, 6)


def test_a_second_training_is_measured_anew():
    profiler = Profiler(2, None)
    trained(plain, False, [profiler])
    first = profiler.profile
    trained(recurrent, False, [profiler])
    assert "lstm" in profiler.profile.layers
    assert "lstm" not in first.layers


@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"shards_per_batch": 4}])
def test_what_cannot_be_measured_is_refused(options):
    with pytest.raises(ConfigError, match=r"not supported: Profiler \(--profile\) with run_eagerly, stages or"):
        trained(plain, False, [Profiler(2, None)], **options)


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_training_that_fails_leaves_no_later_one_measured(interrupted):
    def stop(batch, logs):
        raise KeyboardInterrupt

    model = dp.Sequential([dp.Input((6, 5)), dp.layers.Flatten(), dp.layers.Dense(3)])
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, jit_compile=False, shards_per_batch=None if interrupted else 4)
    callbacks = [Profiler(2, None), *([dp.callbacks.LambdaCallback(on_train_batch_end=stop)] if interrupted else [])]
    with pytest.raises(KeyboardInterrupt if interrupted else ConfigError):
        model.fit(X, Y, batch_size=8, verbose=0, callbacks=callbacks)
    model.fit(X, Y, batch_size=8, verbose=0)
    assert callbacks[0]._trainer.programs.clock is None


@pytest.mark.parametrize("steps", [0, -1, True, 2.5, "3"])
def test_steps_are_a_whole_number(steps):
    with pytest.raises(ConfigError, match="expected an integer >= 1"):
        Profiler(steps)


def test_a_trace_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OutputError, match="choose another `path` of Profiler"):
        trained(plain, False, [Profiler(2, tmp_path / "nowhere" / "trace.json")])


def kernel(name, **layers):
    return KernelDescription(name, "", [], layers)


def test_time_is_divided_by_the_operations_of_layers_and_overlaps_count_once():
    clock = Clock(1, [kernel("both", a=3, b=1), kernel("message", messages=0), kernel("late", b=2)])
    clock.add_step([Span(0, 0, 400), Span(1, 200, 800), Span(2, 900, 1000)])
    profile = profile_of(clock)
    assert profile.mean == pytest.approx(1e-6)
    assert profile.between == pytest.approx(1e-7)
    assert profile.layers == pytest.approx({"messages": 6e-7, "a": 3e-7, "b": 2e-7})
    assert [each.kernel.kind for each in profile.kernels] == ["message", "both", "late"]


def test_clocks_of_other_nodes_are_aligned():
    clock = Clock(1, [kernel("loop", a=1)])
    clock.add_step([Span(0, 5_000_000, 5_001_000)])
    (event,) = [event for event in events_of(clock, 3, "node", 1_000_000) if event["ph"] == "X"]
    assert (event["pid"], event["ts"], event["dur"]) == (3, 4000.0, 1.0)
