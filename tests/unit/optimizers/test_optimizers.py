"""Each optimizer: one step by hand, and a trajectory computed in exact steps."""

import math

import numpy as np
import pytest

from dptrain import optimizers
from dptrain.backend.cpu.backend import NumpyBackend
from dptrain.errors import ConfigError
from dptrain.initializers import Zeros
from dptrain.optimizers import OPTIMIZERS, SGD, Adam, AdamW, RMSprop, Update, Updater, schedules
from dptrain.params import ParamLayout, ParamSpec

OPS = NumpyBackend(np.float64)


def run(optimizer: optimizers.Optimizer, gradients: list[float], weight: float = 2.0) -> list[float]:
    """Return a parameter's values that starts at 1 and sees these mean gradients."""
    layout = ParamLayout([("dense/kernel", ParamSpec("kernel", (1,), Zeros()))])
    p, values = OPS.zeros((layout.size,)), []
    p[0] = 1.0
    slots = {name: OPS.zeros((layout.size,)) for name in optimizer.all_slots}
    scratch = [OPS.empty((layout.size,)) for _ in range(optimizer.scratch)]
    updater = Updater(OPS, optimizer, layout.entries, slots, scratch)
    for gradient in gradients:
        g = OPS.zeros((layout.size,))
        g[0] = gradient * weight
        updater.apply(p, g, np.array([weight]))
        values.append(float(p[0]))
        assert not p[1:].any(), "gaps stay zero"
    return values


def test_adam_first_step_by_hand():
    # m = 0.1 * 0.5 = 0.05, v = 0.001 * 0.25 = 2.5e-4, alpha = 0.1 * sqrt(0.001) / 0.1 = 0.0316227766
    # p = 1 - 0.0316227766 * 0.05 / (0.0158113883 + 1e-7)
    assert run(Adam(0.1), [0.5]) == pytest.approx(
        [1 - 0.0316227766016838 * 0.05 / (0.0158113883008419 + 1e-7)], rel=1e-14
    )


def test_rmsprop_first_step_by_hand():
    # v = 0.1 * 0.25 = 0.025
    assert run(RMSprop(0.01), [0.5]) == pytest.approx([1 - 0.01 * 0.5 / math.sqrt(0.025 + 1e-7)], rel=1e-14)


def test_sgd_steps_by_hand():
    assert run(SGD(0.1), [0.5, -1.0]) == pytest.approx([0.95, 1.05], rel=1e-14)
    # m = -0.05, then 0.9 * -0.05 + 0.1 = 0.055
    assert run(SGD(0.1, momentum=0.9), [0.5, -1.0]) == pytest.approx([0.95, 1.005], rel=1e-14)


def test_adam_trajectory_with_corrected_moments():
    """The textbook form with corrected moments equals ours when its epsilon is divided by sqrt(1 - beta_2^t)."""
    gradients = [0.5, -0.25, 1.0, 0.0, 3.0, -2.0, 1e-3, 0.1, 0.2, -0.4]
    m = v = 0.0
    p, expected = 1.0, []
    for t, g in enumerate(gradients, start=1):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        corrected = math.sqrt(v / (1 - 0.999**t)) + 1e-7 / math.sqrt(1 - 0.999**t)
        p -= 0.01 * m / (1 - 0.9**t) / corrected
        expected.append(p)
    assert run(Adam(0.01), gradients) == pytest.approx(expected, rel=1e-12)


def test_rmsprop_with_momentum_and_means_by_hand():
    # v = 0.025, mean = 0.05, root = sqrt(0.025 - 0.0025 + 1e-7), m = 0.01 * 0.5 / root; then g = -1:
    # v = 0.1225, mean = 0.045 - 0.1 = -0.055
    first = 0.01 * 0.5 / math.sqrt(0.0225 + 1e-7)
    second = 0.5 * first - 0.01 / math.sqrt(0.1225 - 0.055**2 + 1e-7)
    optimizer = RMSprop(0.01, momentum=0.5, centered=True)
    assert run(optimizer, [0.5, -1.0]) == pytest.approx([1 - first, 1 - first - second], rel=1e-14)


def test_nesterov_by_hand():
    # m = -0.05, p = 1 + 0.9 * -0.05 - 0.05 = 0.905; m = -0.045 + 0.1 = 0.055, p += 0.9 * 0.055 + 0.1
    assert run(SGD(0.1, 0.9, nesterov=True), [0.5, -1.0]) == pytest.approx([0.905, 1.0545], rel=1e-14)
    assert run(SGD(0.1, nesterov=True), [0.5]) == pytest.approx([0.95], rel=1e-14), "without momentum nothing changes"


def test_amsgrad_keeps_the_highest():
    """After a gradient of 3 the divisor never falls: 200 small ones move less than without."""
    gradients = [3.0] + [1e-2] * 1000
    plain, kept = run(Adam(0.01, beta_2=0.9), gradients), run(Adam(0.01, beta_2=0.9, amsgrad=True), gradients)
    assert kept[0] == pytest.approx(plain[0], rel=1e-12)
    assert abs(kept[-1] - kept[-2]) < 0.02 * abs(plain[-1] - plain[-2])


def test_weight_decay_by_hand():
    # p = 1 - 1 * 0.1 * 0.5 = 0.95 first, then -= 0.1 * 0.5
    assert run(SGD(0.1, weight_decay=0.5), [0.5]) == pytest.approx([0.9], rel=1e-14)
    assert run(AdamW(0.1, 0.5), [0.0, 0.0]) == pytest.approx([0.95, 0.9025], rel=1e-14)
    excluded = AdamW(0.1, 0.5)
    excluded.exclude_from_weight_decay(var_names=["bias", "kern"])
    assert run(excluded, [0.0]) == [1.0]
    other = AdamW(0.1, 0.5)
    other.exclude_from_weight_decay(var_names=["bias", "dense"])
    assert run(other, [0.0]) == pytest.approx([0.95]), "the layer's name is not the parameter's"


@pytest.mark.parametrize("optimizer", [lambda **o: SGD(1.0, **o), lambda **o: SGD(1.0, 0.5, nesterov=True, **o)])
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_a_single_element_is_clipped_to_the_limit(optimizer, clip):
    """The limit holds for the mean gradient, not for the sum."""
    for gradient, clipped in [(0.5, 0.5), (-0.75, -0.75), (4.0, 0.75), (-4.0, -0.75), (0.0, 0.0)]:
        expected = run(optimizer(), [clipped])
        assert run(optimizer(**{clip: 0.75}), [gradient], weight=128.0) == pytest.approx(expected, rel=1e-14)
        assert run(optimizer(**{clip: 0}), [gradient]) == pytest.approx(run(optimizer(), [gradient]), rel=1e-14)


def clipped_gradients(**limits: float) -> tuple[np.ndarray, np.ndarray]:
    """Return what a step of rate 1 subtracts from a kernel with gradients 3, 4 and a bias with gradient 12."""
    layout = ParamLayout(
        [("a/kernel", ParamSpec("kernel", (2,), Zeros())), ("a/bias", ParamSpec("bias", (1,), Zeros()))]
    )
    p, g = OPS.zeros((layout.size,)), OPS.zeros((layout.size,))
    layout.entries[0].view(g)[...] = np.array([3.0, 4.0]) * 8
    layout.entries[1].view(g)[...] = 12.0 * 8
    Updater(OPS, SGD(1.0, **limits), layout.entries, {}, []).apply(p, g, np.array([8.0]))
    return -layout.entries[0].view(p), -layout.entries[1].view(p)


def test_what_is_clipped():
    kernel, bias = clipped_gradients(clipnorm=1.0)
    assert (kernel, bias) == (pytest.approx([0.6, 0.8]), pytest.approx([1.0]))
    kernel, bias = clipped_gradients(clipnorm=6.0)
    assert (kernel, bias) == (pytest.approx([3.0, 4.0]), pytest.approx([6.0]))
    kernel, bias = clipped_gradients(global_clipnorm=1.3)
    assert (kernel, bias) == (pytest.approx([0.3, 0.4]), pytest.approx([1.2]))
    kernel, bias = clipped_gradients(clipvalue=3.5)
    assert (kernel, bias) == (pytest.approx([3.0, 3.5]), pytest.approx([3.5]))


def test_gradients_accumulate():
    """Every third batch updates by the mean of three; nothing before it, and every batch has its own weight."""
    together = run(SGD(0.1, gradient_accumulation_steps=3), [0.3, 0.6, -1.5, 3.0, 0.0, 0.0])
    assert together == pytest.approx([1.0, 1.0, 1.02, 1.02, 1.02, 0.92], rel=1e-12)
    limited = run(SGD(0.1, clipvalue=0.1, gradient_accumulation_steps=2), [5.0, -4.9])
    assert limited == pytest.approx([1.0, 0.995], rel=1e-12), "the mean is clipped, not its parts"


def test_iterations_and_what_a_schedule_sees():
    """A schedule counts batches, the bias correction updates."""
    seen: list[int] = []

    class Watched(schedules.LearningRateSchedule):
        def __call__(self, step: int) -> float:
            seen.append(step)
            return 0.01

    optimizer = Adam(Watched(), gradient_accumulation_steps=2)
    watched = run(optimizer, [0.4, 0.6, 0.0, -2.0])
    assert seen == [0, 1, 2, 3]
    assert (optimizer.steps, optimizer.iterations) == (4, 2)
    assert watched[1::2] == pytest.approx(run(Adam(0.01), [0.5, -1.0]), rel=1e-12)
    assert optimizer.describe() == {"learning_rate": "Watched"}
    with pytest.raises(NotImplementedError, match="Watched' must override `get_config"):
        optimizer.get_config()


def test_the_learning_rate_can_be_set():
    optimizer = SGD(0.5)
    assert float(optimizer.learning_rate) == 0.5
    optimizer.learning_rate = 0.25
    assert run(optimizer, [1.0]) == [0.75]
    optimizer.learning_rate = schedules.ExponentialDecay(0.5, 1, 0.5)
    assert run(optimizer, [1.0, 1.0]) == [0.5, 0.25]
    assert optimizer.learning_rate == 0.125, "of the next step"
    with pytest.raises(TypeError, match="its learning rate is not settable"):
        optimizer.learning_rate = 0.1
    with pytest.raises(ConfigError, match="its learning rate is not settable"):
        optimizer.learning_rate = 0.1
    with pytest.raises(ConfigError, match="learning_rate = nan"):
        SGD().learning_rate = float("nan")


@pytest.mark.parametrize("weight", [1.0, 3.0, 128.0])
@pytest.mark.parametrize("optimizer", [Adam, AdamW, RMSprop, SGD])
def test_the_update_divides_by_the_weight(optimizer, weight):
    gradients = [0.5, -0.25, 1.0]
    assert run(optimizer(0.01), gradients, weight) == pytest.approx(run(optimizer(0.01), gradients, 1.0), rel=1e-12)


EVERYTHING = {
    "weight_decay": 0.1,
    "clipnorm": 2.0,
    "gradient_accumulation_steps": 3,
    "name": "mine",
}
OWN = {
    "sgd": {"momentum": 0.5, "nesterov": True},
    "rmsprop": {"rho": 0.5, "momentum": 0.5, "epsilon": 1e-3, "centered": True},
    "adam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3, "amsgrad": True},
    "adamw": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3, "amsgrad": True},
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_rebuilds_the_optimizer(name):
    rate = schedules.CosineDecay(0.1, 10)
    optimizer = OPTIMIZERS[name](learning_rate=rate, **EVERYTHING, **OWN[name])
    config = optimizer.config()
    assert {key: config[key] for key in (*EVERYTHING, *OWN[name])} == EVERYTHING | OWN[name]
    assert config["learning_rate"]["class_name"] == "CosineDecay"
    description = optimizers.serialize(optimizer)
    for again in (
        optimizers.deserialize(description),
        optimizers.get(description),
        type(optimizer).from_config(config),
    ):
        assert type(again) is type(optimizer)
        assert again.config() == config
        assert again.learning_rate == 0.1
    assert description["config"] == config, "not changed by reading it"
    assert optimizers.get(name).config() == OPTIMIZERS[name]().config()
    assert type(optimizers.get(type(optimizer).__name__)) is type(optimizer)


def test_names_are_those_of_keras():
    names = [OPTIMIZERS[name]().name for name in ("sgd", "rmsprop", "adam", "adamw")]
    assert names == ["sgd", "rm_sprop", "adam", "adam_w"]


class Signs(optimizers.Optimizer):
    """A user's own rule."""

    def update_step(self, update: Update) -> None:
        update.ops.sign(update.grads, update.grads)
        update.ops.axpby(-update.learning_rate, update.grads, 1, update.params, update.params)


def test_a_rule_of_the_users_own():
    assert run(Signs(0.25, clipnorm=1.0), [7.0, -0.1, 0.0], weight=3.0) == [0.75, 1.0, 1.0]
    description = optimizers.serialize(Signs(0.25))
    assert (description["module"], description["registered_name"]) == (__name__, "Signs")
    assert type(optimizers.deserialize(description, {"Signs": Signs})) is Signs
    with pytest.raises(ConfigError, match="unknown optimizer 'Signs'"):
        optimizers.deserialize(description)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Adam(-1), "learning_rate = -1: expected a number >= 0"),
        (lambda: Adam("fast"), "learning_rate = 'fast': expected a number"),
        (lambda: Adam(lambda: 0.1), "not supported: a function as learning_rate"),
        (lambda: Adam(use_ema=True), "not supported: use_ema=True"),
        (lambda: SGD(ema_momentum=0.9), "not supported: ema_momentum=0.9"),
        (lambda: SGD(loss_scale_factor=2.0), "not supported: loss_scale_factor=2.0"),
        (lambda: SGD(momentun=0.9), r"Argument\(s\) not recognized: {'momentun': 0.9}"),
        (lambda: SGD(clipnorm=1, clipvalue=2), "Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set"),
        (lambda: SGD(clipnorm=float("inf")), "clipnorm = inf: expected a number that is finite"),
        (lambda: SGD(gradient_accumulation_steps=1), "`gradient_accumulation_steps` must be an integer >= 2"),
        (lambda: SGD(gradient_accumulation_steps=2.5), "`gradient_accumulation_steps` must be an integer >= 2"),
        (lambda: AdamW(weight_decay=None), "`weight_decay` must be a float"),
        (lambda: SGD().exclude_from_weight_decay([1]), "not supported: exclude_from_weight_decay"),
        (lambda: optimizers.get(3), "Could not interpret optimizer identifier: 3"),
        (
            lambda: optimizers.get({"class_name": "SGD"}),
            "optimizer: expected a dictionary with 'class_name' and 'config'",
        ),
        (lambda: optimizers.deserialize({"class_name": "SGD", "config": {"lr": 1}}), "not recognized: {'lr': 1}"),
        (lambda: Adam(float("nan")), "learning_rate = nan"),
        (lambda: Adam(beta_1=1.0), "beta_1 = 1: expected a number >= 0 and < 1"),
        (lambda: Adam(epsilon=0), "epsilon = 0"),
        (lambda: SGD(momentum=-0.1), "momentum = -0.1"),
        (lambda: SGD(momentum="much"), "momentum = 'much': expected a number"),
        (lambda: SGD(momentum=None), "momentum = None: expected a number"),
        (lambda: RMSprop(rho=2), "rho = 2"),
        (lambda: optimizers.get("adma"), "unknown optimizer 'adma'; did you mean 'adam'"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_decay_is_ignored_as_in_keras():
    with pytest.warns(UserWarning, match="`decay` is no longer supported"):
        SGD(decay=0.1)
