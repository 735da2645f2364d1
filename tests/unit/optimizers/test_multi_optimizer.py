"""Several optimizers in one: each variable follows its own as if that one were alone."""

from contextlib import nullcontext

import numpy as np
import pytest

import dptrain as dp
from dptrain.callbacks import BackupAndRestore, LambdaCallback, LearningRateScheduler, ReduceLROnPlateau
from dptrain.errors import ConfigError, DataError
from dptrain.optimizers import (
    SGD,
    Adam,
    LossScaleOptimizer,
    MultiOptimizer,
    OptimizerMap,
    ScheduleFreeAdamW,
    deserialize,
    schedules,
    serialize,
)
from dptrain.program.tensor import Variable
from dptrain.saving.keras_config import compile_arguments
from tests.unit.callbacks import FakeModel, build, drive, toy
from tests.unit.optimizers.test_optimizers import gradients_of, step, traced, two_variables
from tests.unit.program.sharding.test_mesh import DATA, Perceptron
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh, spread


def several(**options) -> MultiOptimizer:
    decay = schedules.ExponentialDecay(0.1, 3, 0.9)
    rest = {"dense/bias": SGD(decay, momentum=0.9, gradient_accumulation_steps=2, use_ema=True)}
    return MultiOptimizer(OptimizerMap(Adam(0.01, clipnorm=0.1), rest), **options)


@pytest.mark.parametrize("way", ["eager", "traced"])
def test_each_variable_follows_its_own_optimizer_alone(way):
    together, apart, optimizer = two_variables("float32"), two_variables("float32"), several()
    bias, kernel = optimizer.optimizers
    twins = [type(part).from_config(part.get_config()) for part in (kernel, bias)]
    program = traced(optimizer, together) if way == "traced" else None
    for grads in gradients_of("float32", 7):
        optimizer.apply(grads, together) if program is None else step(program, grads)
        for twin, grad, lone in zip(twins, grads, apart, strict=True):
            twin.apply([grad], [lone])
    assert [int(part.iterations) for part in (optimizer, kernel, bias)] == [7, 7, 3]
    assert optimizer._ends_with_averages
    optimizer.finalize_variable_values(together)
    twins[1].finalize_variable_values(apart[1:])
    actual = [variable.numpy() for variable in (*together, *kernel.variables, *bias.variables)]
    expected = [variable.numpy() for variable in (*apart, *twins[0].variables, *twins[1].variables)]
    assert [array.tobytes() for array in actual] == [array.tobytes() for array in expected]
    assert optimizer.variables == [*optimizer._own_variables, *bias.variables, *kernel.variables]
    assert [owner for _, owner in optimizer._all_slots] == [together[0]] * 2 + [together[1]] * 3


def test_a_function_is_asked_once_for_each_variable():
    paths = []

    def choose(variable):
        paths.append(variable.path)
        return SGD(0.5 if variable.ndim == 2 else 0.25)

    optimizer, variables = MultiOptimizer(choose, loss_scale_factor=2.0), two_variables("float64")
    before = [variable.numpy() for variable in variables]
    assert optimizer.optimizers == []
    optimizer.build(variables[:1])
    for _ in range(2):
        loss = optimizer.scale_loss(dp.ops.sum(variables[0]) + dp.ops.sum(variables[1]))
        for variable in variables:
            variable._gradient = None
        loss.backward()
        optimizer.build(variables)  # with one that has become trainable
        optimizer.apply([variable.value.grad for variable in variables])
    assert paths == ["dense/kernel", "dense/bias"]
    for variable, old, rate in zip(variables, before, (0.5, 0.25), strict=True):
        np.testing.assert_allclose(variable.numpy(), old - 2 * rate)
    assert optimizer._rates == {"learning_rate_sgd": 0.5, "learning_rate_sgd_1": 0.25}
    assert optimizer._program_version == 0
    optimizer.optimizers[0].learning_rate = schedules.ExponentialDecay(1.0, 1, 0.5)
    assert (optimizer._program_version, optimizer._follows_schedule) == (1, True), "a program must be traced again"


def test_there_is_no_learning_rate():
    optimizer = several()
    assert not hasattr(optimizer, "learning_rate")
    with pytest.raises(ConfigError, match="Learning rate cannot be set on a MultiOptimizer"):
        optimizer.learning_rate = 0.1
    with pytest.raises(AttributeError, match="Access the learning rate on the individual sub-optimizers"):
        float(optimizer.learning_rate)


def test_on_a_mesh():
    rest = {"w.": ScheduleFreeAdamW(0.01, weight_decay=0.1), "b1": SGD(0.1, momentum=0.9)}
    optimizer = LossScaleOptimizer(MultiOptimizer(OptimizerMap(Adam(global_clipnorm=0.1), rest)), 4.0)
    program = Perceptron(optimizer=optimizer).program
    assert_same_on_mesh(program, DATA, spread(program), VirtualMesh([4, 0, 7], model=2))


def test_a_map_goes_by_paths():
    default, exact, matched = SGD(), SGD(), SGD()
    mapping = OptimizerMap(default, {"encoder/dense": exact, "encoder/.*": matched})
    expected = {"encoder/dense": exact, "encoder/norm": matched, "encoder": default, "my/encoder/norm": default}
    assert {path: mapping[path] for path in expected} == expected
    mapping["en.*/norm"] = SGD()
    with pytest.raises(ConfigError, match="Multiple optimizers assigned to variable encoder/norm"):
        mapping["encoder/norm"]
    del mapping["en.*/norm"]
    assert (len(mapping), list(mapping)) == (2, ["encoder/dense", "encoder/.*"])


def choose(variable: Variable) -> Adam:
    return Adam()


def test_configurations_rebuild_it():
    described = serialize(several(name="mine", loss_scale_factor=8.0))
    restored = deserialize(described)
    assert serialize(restored) == described
    assert [type(optimizer) for optimizer in restored.optimizers] == [SGD, Adam]
    assert [optimizer.loss_scale_factor for optimizer in restored.optimizers] == [8.0, 8.0]
    assert restored._describe() == several(loss_scale_factor=8.0)._describe() != several()._describe()
    described = serialize(MultiOptimizer(choose))
    assert described["config"]["optimizer_map"]["config"] == "choose"
    assert deserialize(described, {"choose": choose}).get_config() == MultiOptimizer(choose).get_config()
    with pytest.raises(ConfigError, match="unknown function 'choose'; pass it in custom_objects"):
        deserialize(described)
    by_lambda = MultiOptimizer(lambda variable: Adam())
    assert "lambda" in by_lambda._describe()["optimizer_map"]
    with pytest.raises(ConfigError, match="writing the lambda"):
        by_lambda.get_config()


def test_optimizers_within_another_one_as_keras_on_pytorch_writes_them():
    described = serialize(several())
    inner = described["config"]["optimizer_map"]["config"]
    inner["default_optimizer"]["module"] = "keras.src.backend.torch.optimizers.torch_adam"
    inner["optimizer_map"]["dense/bias"]["module"] = "keras.src.backend.torch.optimizers.torch_sgd"
    restored = compile_arguments({"optimizer": described, "loss": "mse"})["optimizer"]
    assert serialize(restored) == serialize(several())


def test_an_interrupted_training_goes_on_with_all_rates(tmp_path):
    """A callback changes a rate at the begin of each epoch: asked twice for one epoch it would change it twice."""

    class StoppedError(Exception):
        pass

    def decay(epoch, logs):
        inner = model.optimizer.optimizers[0]
        inner.learning_rate = inner.learning_rate * 0.5

    def stop(batch, logs):
        if (int(model.optimizer.iterations), batch) == (6, 1):
            raise StoppedError

    (x, y), results = toy(30), []
    for backs_up, stops in ((False, False), (True, True), (True, False)):
        inner = OptimizerMap(ScheduleFreeAdamW(0.01), {".*/bias": SGD(0.5, momentum=0.9)})
        model = build(MultiOptimizer(inner), jit_compile=False)
        callbacks = [LambdaCallback(on_epoch_begin=decay)]
        callbacks += [BackupAndRestore(tmp_path, 1)] if backs_up else []
        callbacks += [LambdaCallback(on_train_batch_end=stop)] if stops else []
        with pytest.raises(StoppedError) if stops else nullcontext():
            model.fit(x, y, batch_size=8, epochs=3, verbose=0, callbacks=callbacks)
        if not stops:
            assert model.optimizer._rates == {"learning_rate_sgd": 0.0625, "learning_rate_schedule_free_adam_w": 0.01}
            results.append([weight.numpy().tobytes() for weight in (*model.weights, *model.optimizer.variables)])
    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerMap("adam"), "default_optimizer must be a Keras Optimizer instance"),
        (lambda: OptimizerMap(SGD(), [SGD()]), "optimizer_map must be a dictionary"),
        (lambda: OptimizerMap(SGD(), {"a": "sgd"}), "optimizer must be a Keras Optimizer instance"),
        (lambda: OptimizerMap(SGD(), {1: SGD()}), "key must be a string"),
        (lambda: OptimizerMap(SGD(), {"a(": SGD()}), "not a regular expression"),
        (lambda: OptimizerMap(SGD(), {"a": LossScaleOptimizer(SGD())}), "optimizer cannot be LossScaleOptimizer"),
        (lambda: OptimizerMap(SGD(), {"a": several()}), "optimizer cannot be MultiOptimizer"),
        (lambda: OptimizerMap(SGD(), {"a": SGD()}).__setitem__("a", SGD()), "'a' already exists in the OptimizerMap"),
        (lambda: MultiOptimizer({"a": SGD()}), "expected an|must be an OptimizerMap"),
        (lambda: MultiOptimizer(OptimizerMap(several())), "MultiOptimizer cannot be used inside"),
        (
            lambda: MultiOptimizer(lambda variable: "sgd").build(two_variables("float32")),
            "for each variable, found 'sgd'",
        ),
        (
            lambda: several().exclude_from_weight_decay(var_names=["bias"]),
            "exclude_from_weight_decay on its optimizers",
        ),
        (lambda: deserialize({"class_name": "MultiOptimizer", "config": {}}), "must be an OptimizerMap"),
    ],
)
def test_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_rates_of_another_number_of_optimizers_are_refused():
    with pytest.raises(DataError, match=r"the learning rates of 2 optimizers, found 0\.5"):
        several()._resume_learning_rate(0.5)


SETTING_RATES = {
    "LearningRateScheduler": lambda: LearningRateScheduler(lambda epoch, rate: rate * 0.5 + epoch / 100),
    "LearningRateScheduler of epochs": lambda: LearningRateScheduler(lambda epoch: 0.5 / (epoch + 1)),
    "ReduceLROnPlateau": lambda: ReduceLROnPlateau("loss", factor=0.5, patience=1, cooldown=1),
    "ReduceLROnPlateau to a least rate": lambda: ReduceLROnPlateau("loss", factor=0.5, patience=1, min_lr=0.03),
}


@pytest.mark.parametrize("callback", SETTING_RATES)
def test_a_callback_sets_the_rate_of_each_optimizer_as_if_it_were_alone(callback):
    def rates(optimizer):
        model = FakeModel()
        model.optimizer = optimizer
        logs = drive(SETTING_RATES[callback](), [{"loss": loss} for loss in (3.0, 3.0, 2.0, 2.0, 2.0, 2.0)], model)
        return [[value for name, value in of_epoch.items() if "learning_rate" in name] for of_epoch in logs]

    def parts():
        return [SGD(0.1, name="a"), SGD(0.04, name="b"), SGD(0.01, name="c")]

    first, *others = parts()
    together = MultiOptimizer(OptimizerMap(first, {"x": others[0], "y": others[1]}))
    together.build([Variable(np.zeros(2), name) for name in ("w", "x", "y")])
    order = [part.name for part in together.optimizers]
    alone = {part.name: rates(part) for part in parts()}
    expected = [[alone[name][epoch][0] for name in order] for epoch in range(6)]
    np.testing.assert_allclose(rates(together), expected, rtol=1e-6)
    assert len({tuple(of_epoch) for of_epoch in expected}) > 2
