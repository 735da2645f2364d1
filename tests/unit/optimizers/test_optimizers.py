"""Each optimizer: its rule in NumPy float64, steps by hand, and one traced program for all steps."""

import copy
import inspect
import math

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops, optimizers
from dptrain.errors import ConfigError
from dptrain.optimizers import OPTIMIZERS, SGD, Adam, AdamW, Lion, RMSprop, schedules
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.kernels import Loop
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, ReferenceExecutable, evaluate
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import Variable
from tests.sample import sample
from tests.tolerances import assert_near
from tests.unit.optimizers.references import RULES
from tests.unit.program.virtual_mesh import VirtualMesh, assert_same_on_mesh, spread
from tests.unit.program.virtual_ranks import run_on_ranks

STEPS = 20
ALL = [pytest.param(name, rule, id=f"{name}-{n}") for name, rules in RULES.items() for n, rule in enumerate(rules)]


def run(optimizer: optimizers.Optimizer, gradients: list[float]) -> list[float]:
    """Return a variable's values that starts at 1 and sees these gradients."""
    kernel, values = named("dense/kernel", [1.0]), []
    for gradient in gradients:
        optimizer.apply([np.array([gradient])], [kernel])
        values.append(float(kernel.numpy()[0]))
    return values


def named(path: str, value, dtype: str = "float64") -> Variable:
    variable = Variable(np.array(value, dtype), path.rpartition("/")[2])
    variable.path = path
    return variable


def two_variables(dtype: str) -> list[Variable]:
    rng = np.random.default_rng(3)
    return [named("dense/kernel", rng.standard_normal((3, 2)), dtype), named("dense/bias", [0.5, -0.5], dtype)]


def gradients_of(dtype: str, steps: int = STEPS) -> list[list[np.ndarray]]:
    """Return gradients for two variables, of all sizes, some zero."""
    rng = np.random.default_rng(4)
    sizes = 10.0 ** rng.integers(-4, 2, steps)
    steps_of_grads = [[size * rng.standard_normal(shape) for shape in ((3, 2), (2,))] for size in sizes]
    steps_of_grads[5][1][...] = 0
    return [[grad.astype(dtype) for grad in step] for step in steps_of_grads]


def traced(optimizer: optimizers.Optimizer, variables: list[Variable]):
    """Return the program of one step; the gradients are its inputs."""

    def step(*grads):
        optimizer.apply(grads, variables)
        return {}

    return trace(step, {f"g{n}": (variable.shape, variable.dtype) for n, variable in enumerate(variables)})


def step(program, grads) -> None:
    """Execute a program once, and keep the new state."""
    _, updates = evaluate(program, {f"g{n}": grad for n, grad in enumerate(grads)})
    for variable, value in updates.items():
        variable.assign(value)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize(("name", "rule"), ALL)
def test_twenty_steps(name, rule, dtype):
    optimizer, variables = OPTIMIZERS[name](0.05, **rule.options), two_variables(dtype)
    gradients, decay = gradients_of(dtype), 0.05 * 0.004 if name == "adamw" else 0.0
    expected = []
    for number, variable in enumerate(variables):
        p, own_grads = variable.numpy(), [grads[number] for grads in gradients]
        if decay:
            expected.append(decayed_trajectory(rule, p, own_grads, decay))
        else:
            expected.append(rule.trajectory(p, own_grads, [0.05] * STEPS))
    for number, grads in enumerate(gradients):
        optimizer.apply(grads, variables)
        for variable, values in zip(variables, expected, strict=True):
            assert_near(variable.numpy(), values[number], dtype, scale=10)
    assert int(optimizer.iterations) == STEPS
    assert np.abs(variables[0].numpy() - two_variables(dtype)[0].numpy()).max() > 1e-4, "the steps say little"


def decayed_trajectory(rule, p, gradients, decay):
    """Return p after each update; the steps of Adam do not depend on p, which loses a part of itself before them."""
    steps = np.diff(
        [np.zeros(p.shape), *rule.trajectory(np.zeros(p.shape), gradients, [0.05] * len(gradients))], axis=0
    )
    results, now = [], p.astype(np.float64)
    for step in steps:
        now = now * (1 - decay) + step
        results.append(now)
    return results


EVERYWHERE = [
    {},
    {"weight_decay": 0.1},
    {"clipnorm": 0.3},
    {"clipvalue": 0.02},
    {"global_clipnorm": 0.2, "use_ema": True, "ema_momentum": 0.5, "ema_overwrite_frequency": 3},
    {"gradient_accumulation_steps": 3, "clipnorm": 0.3, "weight_decay": 0.1, "use_ema": True},
    {"learning_rate": schedules.CosineDecay(0.0, 10, 0.1, warmup_target=0.02, warmup_steps=5)},
]


@pytest.mark.parametrize("options", sample(EVERYWHERE, 2), ids=[" ".join(option) or "plain" for option in EVERYWHERE])
@pytest.mark.parametrize(("name", "rule"), ALL)
def test_a_traced_program_has_the_bits_of_eager_steps(name, rule, options):
    """And those of a prepared one, whose updates are written over the state."""
    results, gradients = [], gradients_of("float32", 7)
    for mode in ("eager", "traced", "prepared"):
        optimizer, variables = OPTIMIZERS[name](**(rule.options | options)), two_variables("float32")
        if mode == "eager":
            for grads in gradients:
                optimizer.apply(grads, variables)
        else:
            program = traced(optimizer, variables)
            if mode == "traced":
                for grads in gradients:
                    step(program, grads)
            else:
                arrays = {f"g{n}": np.zeros(variable.shape, variable.dtype) for n, variable in enumerate(variables)}
                executable = ReferenceExecutable(program, HostMemory(), arrays)
                for grads in gradients:
                    for array, grad in zip(arrays.values(), grads, strict=True):
                        array[...] = grad
                    executable.run()
        results.append([variable.numpy() for variable in (*variables, *optimizer.variables)])
    for other in results[1:]:
        assert [array.tobytes() for array in other] == [array.tobytes() for array in results[0]]


def test_the_numbers_of_a_step_are_computed_once():
    """A program raises beta to the power of t once, however many variables there are."""
    variables = [named(f"dense_{n}/kernel", np.zeros(3), "float32") for n in range(5)]
    program = traced(Adam(), variables)
    assert sum(tensor.op is ops.power for tensor in program.tensors) == 2


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.1, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("name", ["sgd", "adam", "adamw", "rmsprop", "nadam", "adagrad", "lion", "schedulefreeadamw"])
def test_a_variable_is_updated_by_one_loop(name, options):
    """So each element of it, of its gradient and of its slots is read and written once; numbers have their own loop."""
    program = place(traced(OPTIMIZERS[name](**options), two_variables("float32")))
    (stage,) = fuse(program).stages
    assert sorted(kernel.space for kernel in stage.kernels if isinstance(kernel, Loop)) == [(), (2,), (3, 2)]
    assert len(stage.kernels) == 3


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
    # m = -0.05, p = 1 + 0.9 * -0.05 - 0.05 = 0.905; m = -0.045 + 0.1 = 0.055, p += 0.9 * 0.055 + 0.1
    assert run(SGD(0.1, 0.9, nesterov=True), [0.5, -1.0]) == pytest.approx([0.905, 1.0545], rel=1e-14)
    assert run(SGD(0.1, nesterov=True), [0.5]) == pytest.approx([0.95], rel=1e-14), "without momentum nothing changes"


def test_weight_decay_by_hand():
    # p = 1 - 1 * 0.1 * 0.5 = 0.95 first, then -= 0.1 * 0.5
    assert run(SGD(0.1, weight_decay=0.5), [0.5]) == pytest.approx([0.9], rel=1e-14)
    assert run(AdamW(0.1, 0.5), [0.0, 0.0]) == pytest.approx([0.95, 0.9025], rel=1e-14)
    excluded = AdamW(0.1, 0.5)
    excluded.exclude_from_weight_decay(var_names=["bias", "kern"])
    assert run(excluded, [0.0]) == [1.0]
    other = AdamW(0.1, 0.5)
    other.exclude_from_weight_decay(var_names=["bias", "dense"])
    assert run(other, [0.0]) == pytest.approx([0.95]), "the layer's name is not the variable's"
    listed, unlisted = named("a/kernel", [1.0]), named("b/kernel", [1.0])
    optimizer = AdamW(0.1, 0.5)
    optimizer.exclude_from_weight_decay([listed])
    optimizer.apply([np.zeros(1), np.zeros(1)], [listed, unlisted])
    assert (float(listed.numpy()[0]), float(unlisted.numpy()[0])) == (1.0, pytest.approx(0.95))
    with pytest.raises(ConfigError, match="only be configued before the optimizer is built"):
        optimizer.exclude_from_weight_decay([unlisted])


@pytest.mark.parametrize("optimizer", [lambda **o: SGD(1.0, **o), lambda **o: SGD(1.0, 0.5, nesterov=True, **o)])
@pytest.mark.parametrize("clip", ["clipnorm", "global_clipnorm", "clipvalue"])
def test_a_single_element_is_clipped_to_the_limit(optimizer, clip):
    for gradient, clipped in [(0.5, 0.5), (-0.75, -0.75), (4.0, 0.75), (-4.0, -0.75), (0.0, 0.0)]:
        expected = run(optimizer(), [clipped])
        assert run(optimizer(**{clip: 0.75}), [gradient]) == pytest.approx(expected, rel=1e-14)
        assert run(optimizer(**{clip: 0}), [gradient]) == pytest.approx(run(optimizer(), [gradient]), rel=1e-14)


CLIPPED = [
    ({"clipnorm": 1.0}, [0.6, 0.8], 1.0),
    ({"clipnorm": 6.0}, [3.0, 4.0], 6.0),
    ({"global_clipnorm": 1.3}, [0.3, 0.4], 1.2),
    ({"clipvalue": 3.5}, [3.0, 3.5], 3.5),
]


@pytest.mark.parametrize(("limits", "kernel", "bias"), CLIPPED)
def test_what_is_clipped(limits, kernel, bias):
    """A step of rate 1 subtracts the clipped gradients: 3, 4 of a kernel and 12 of a bias."""
    variables = [named("a/kernel", [0.0, 0.0]), named("a/bias", [0.0])]
    SGD(1.0, **limits).apply([np.array([3.0, 4.0]), np.array([12.0])], variables)
    assert list(-variables[0].numpy()) == pytest.approx(kernel)
    assert list(-variables[1].numpy()) == pytest.approx([bias])


@pytest.mark.parametrize("limit", ["clipnorm", "global_clipnorm"])
def test_a_norm_that_is_not_finite_is_seen(limit):
    kernel = named("a/kernel", [0.0, 0.0])
    SGD(1.0, **{limit: 1.0}).apply([np.array([np.inf, 1.0])], [kernel])
    assert np.isnan(kernel.numpy()).all()


@pytest.mark.parametrize("shards", [[11], [4, 4, 3], [0, 11, 0]])
@pytest.mark.parametrize(
    "limits", [limit for limit, *_ in CLIPPED] + [{"gradient_accumulation_steps": 2, "clipnorm": 0.1}]
)
def test_ranks_clip_the_sum_of_their_gradients(limits, shards):
    """Two steps of a regression on ranks that have parts of the batch, and by NumPy on all of it."""
    rng = np.random.default_rng(6)
    x, y, start = rng.standard_normal((11, 4)), rng.standard_normal((11, 2)), rng.standard_normal((4, 2))
    kernel = named("dense/kernel", start)
    optimizer = SGD(0.1, momentum=0.9, **limits)

    def regress(x, y):
        loss = ops.mean(ops.square(ops.matmul(x, kernel) - y))
        kernel._gradient = None
        loss.backward()
        optimizer.apply([kernel.value.grad], [kernel])
        return {"loss": loss}

    rows = {"x": ((Dim.rows(11), 4), "float64"), "y": ((Dim.rows(11), 2), "float64")}
    program = place(trace(regress, rows))
    for _ in range(2):
        results, _ = run_on_ranks(program, {"x": x, "y": y}, shards, {"x": 0, "y": 0})
        for _, state in results[1:]:
            assert all(np.array_equal(state[slot], results[0][1][slot]) for slot in state)
        for key, value in results[0][1].items():
            key.assign(value)
    assert_near(kernel.numpy(), regression_by_numpy(x, y, start, **limits), "float64")


def regression_by_numpy(x, y, w, clipnorm=None, global_clipnorm=None, clipvalue=None, gradient_accumulation_steps=1):
    m, sums, limit = 0.0, 0.0, clipnorm or global_clipnorm
    for number in range(2):
        sums = sums + 2 * x.T @ (x @ w - y) / y.size
        if (number + 1) % gradient_accumulation_steps:
            continue
        g, sums = sums / gradient_accumulation_steps, 0.0
        if limit:
            g = g * min(1, limit / np.linalg.norm(g))
        if clipvalue:
            g = np.clip(g, -clipvalue, clipvalue)
        m = 0.9 * m - 0.1 * g
        w = w + m
    return w


def test_gradients_accumulate():
    """Every third batch updates by the mean of three; nothing before it."""
    together = run(SGD(0.1, gradient_accumulation_steps=3), [0.3, 0.6, -1.5, 3.0, 0.0, 0.0])
    assert together == pytest.approx([1.0, 1.0, 1.02, 1.02, 1.02, 0.92], rel=1e-12)
    limited = run(SGD(0.1, clipvalue=0.1, gradient_accumulation_steps=2), [5.0, -4.9])
    assert limited == pytest.approx([1.0, 0.995], rel=1e-12), "the mean is clipped, not its parts"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_accumulated_gradients_are_one_larger_batch(name):
    """The slots, too, change at every second batch only; what of weights decays does so with it."""
    gradients, variables = gradients_of("float64", 10), two_variables("float64")
    twice, once = (OPTIMIZERS[name](0.05, gradient_accumulation_steps=n, weight_decay=0.1) for n in (2, None))
    for number, grads in enumerate(gradients):
        before = [variable.numpy() for variable in variables]
        twice.apply(grads, variables)
        assert number % 2 or all(np.array_equal(a, b) for a, b in zip(before, variables, strict=True))
    full = two_variables("float64")
    for a, b in zip(gradients[::2], gradients[1::2], strict=True):
        once.apply([(grad + other) / 2 for grad, other in zip(a, b, strict=True)], full)
    assert int(twice.iterations) == int(once.iterations) == 5
    for mine, theirs in zip(variables, full, strict=True):
        assert_near(mine.numpy(), theirs.numpy(), "float64", scale=10)
        for slot, value in once._slots_of(theirs).items():
            assert_near(twice._slots_of(mine)[slot].numpy(), value.numpy(), "float64", scale=100)


def test_what_a_schedule_sees():
    """A schedule counts batches, the bias correction updates."""

    class Watched(schedules.LearningRateSchedule):
        def __call__(self, step):
            numbers_seen.append(int(step))
            return 0.01

    numbers_seen: list[int] = []
    optimizer = Adam(Watched(), gradient_accumulation_steps=2)
    watched = run(optimizer, [0.4, 0.6, 0.0, -2.0])
    assert numbers_seen == [0, 1, 2, 3]
    assert int(optimizer.iterations) == 2
    assert watched[1::2] == pytest.approx(run(Adam(0.01), [0.5, -1.0]), rel=1e-12)
    assert optimizer._describe() == {"learning_rate": "Watched"}
    with pytest.raises(NotImplementedError, match="Watched' must override `get_config"):
        optimizer.get_config()


def test_the_learning_rate_can_be_set():
    optimizer = SGD(0.1)
    assert optimizer.learning_rate == 0.1, "as it was set, not as float32 has it"
    optimizer.learning_rate = 0.25
    assert run(optimizer, [1.0]) == [0.75]
    assert optimizer.get_config()["learning_rate"] == 0.25
    optimizer = SGD(schedules.ExponentialDecay(0.5, 1, 0.5))
    assert len(optimizer.variables) == 1
    assert run(optimizer, [1.0, 1.0]) == [0.5, 0.25]
    assert optimizer.learning_rate == 0.125, "of the next step"
    with pytest.raises(TypeError, match="its learning rate is not settable"):
        optimizer.learning_rate = 0.1
    with pytest.raises(ConfigError, match="its learning rate is not settable"):
        optimizer.learning_rate = 0.1
    with pytest.raises(ConfigError, match="learning_rate = nan"):
        SGD().learning_rate = float("nan")
    optimizer = SGD(0.5)
    optimizer.learning_rate = schedules.ExponentialDecay(0.5, 1, 0.5)
    assert run(optimizer, [1.0, 1.0]) == [0.5, 0.25]


def test_the_learning_rate_has_what_a_variable_has():
    optimizer = SGD(0.1)
    rate = optimizer.learning_rate
    assert isinstance(rate, float)
    assert (float(rate), f"{rate:g}", rate.numpy(), float(rate.value)) == (0.1, "0.1", 0.1, 0.1)
    assert float(ops.convert_to_numpy(rate)) == pytest.approx(0.1)
    rate.assign(0.25)
    assert (rate, optimizer.learning_rate, run(optimizer, [1.0])) == (0.1, 0.25, [0.75])
    assert type(copy.deepcopy(rate)) is type(optimizer.get_config()["learning_rate"]) is float
    for wrong in (-1, "fast"):
        with pytest.raises(ConfigError, match="learning_rate = "):
            rate.assign(wrong)
    with pytest.raises(TypeError, match="its learning rate is not settable"):
        SGD(schedules.ExponentialDecay(0.5, 1, 0.5)).learning_rate.assign(0.1)


def test_a_step_assigns_and_reports_its_learning_rate():
    class Decaying(dp.Sequential):
        def train_step(self, data):
            self.optimizer.learning_rate.assign(self.optimizer.learning_rate * 0.5)
            return {"rate": self.optimizer.learning_rate, **super().train_step(data)}

    model = Decaying([dp.layers.Dense(1, input_shape=(2,))])
    model.compile(SGD(0.5), "mse")
    history = model.fit(np.ones((6, 2)), np.ones(6), batch_size=2, epochs=2, verbose=0).history
    assert history["rate"] == [0.5**4, 0.5**7]


def test_updates_by_hand():
    """Eagerly, by a tape or `backward`, in both forms of the call."""
    weight, by_tape = named("dense/kernel", [2.0]), named("dense/kernel", [2.0])
    first, second = Adam(0.1), Adam(0.1)
    for _ in range(3):
        weight._gradient = None
        first.scale_loss(ops.sum(ops.square(weight))).backward()
        first.apply([weight.value.grad], [weight])
        with dp.GradientTape() as tape:
            loss = ops.sum(ops.square(by_tape))
        second.apply_gradients(zip(tape.gradient(loss, [by_tape]), [by_tape], strict=True))
    np.testing.assert_array_equal(weight.numpy(), by_tape.numpy())
    assert weight.numpy()[0] == pytest.approx(1.7, abs=0.01)
    assert not hasattr(first, "apply_stateless")


def test_stateless_apply_leaves_optimizer_and_variables():
    weight, like = named("dense/kernel", [2.0, -1.0]), named("dense/kernel", [2.0, -1.0])
    optimizer, other = Adam(0.1), Adam(0.1)
    with pytest.raises(ConfigError, match="To call `stateless_apply`, Adam must be built"):
        optimizer.stateless_apply([], [], [])
    optimizer.build([weight])
    other.build([like])
    state, values = [variable.numpy() for variable in optimizer.variables], [weight.numpy()]
    for grad in ([1.0, 0.5], [-0.3, 2.0]):
        values, state = optimizer.stateless_apply(state, [np.float32(grad)], values)
        other.apply([np.float32(grad)], [like])
    np.testing.assert_array_equal(values[0], like)
    for value, variable in zip(state, other.variables, strict=True):
        np.testing.assert_array_equal(value, variable)
    np.testing.assert_array_equal(weight, [2.0, -1.0])
    assert int(optimizer.iterations) == 0
    with pytest.raises(ConfigError, match="`optimizer_variables` must be a list of tensors corresponding 1:1 to Adam"):
        optimizer.stateless_apply(state[1:], [np.float32([1, 1])], values)


def test_a_traced_program_follows_the_learning_rate():
    """It is read at every step, and so is what a schedule makes of the iterations."""
    kernel, optimizer = named("dense/kernel", [1.0]), SGD(0.5)
    program, grad = traced(optimizer, [kernel]), np.ones(1)
    step(program, [grad])
    assert list(kernel.numpy()) == [0.5]
    optimizer.learning_rate = 0.1
    step(program, [grad])
    assert list(kernel.numpy()) == [0.4]
    scheduled = SGD(schedules.PiecewiseConstantDecay([1], [0.5, 0.1]))
    program = traced(scheduled, [kernel])
    for _ in range(3):
        step(program, [grad])
    assert list(kernel.numpy()) == pytest.approx([-0.7])
    assert scheduled.learning_rate == 0.1


def test_a_step_may_set_its_learning_rate():
    kernel, optimizer = named("dense/kernel", [1.0]), SGD(0.5)

    def halve(gradient):
        optimizer.apply([gradient], [kernel])
        optimizer.learning_rate = optimizer.learning_rate * 0.5
        return {}

    program = trace(halve, {"g0": ((1,), "float64")})
    for _ in range(2):
        step(program, [np.ones(1)])
    assert list(kernel.numpy()) == [0.25]
    assert optimizer.learning_rate == 0.125


def test_moving_averages_by_hand():
    """The first average is the variable; then 0.5 of itself and 0.5 of the variable: 0.9, 0.85, 0.775."""
    kernel, optimizer = named("dense/kernel", [1.0]), SGD(0.1, use_ema=True, ema_momentum=0.5)
    averages = []
    for _ in range(3):
        optimizer.apply([np.ones(1)], [kernel])
        averages.append(float(optimizer._slots_of(kernel)["average"].numpy()[0]))
    assert averages == pytest.approx([0.9, 0.85, 0.775])
    assert float(kernel.numpy()[0]) == pytest.approx(0.7)
    optimizer.finalize_variable_values([kernel])
    assert float(kernel.numpy()[0]) == pytest.approx(0.775)
    # Every second iteration the variable becomes its average: 0.85, and from there 0.75 and 0.5 (0.85 + 0.65).
    overwritten = run(SGD(0.1, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2), [1.0] * 4)
    assert overwritten == pytest.approx([0.9, 0.85, 0.75, 0.725])
    SGD(0.1).finalize_variable_values([kernel])
    assert float(kernel.numpy()[0]) == pytest.approx(0.775), "there is no average"


def test_variables_are_those_of_keras():
    """In Keras' order: what it makes together alternates from variable to variable."""
    variables = two_variables("float32")
    paths = {}
    for name, options in (
        ("adam", {"amsgrad": True, "gradient_accumulation_steps": 2}),
        ("rmsprop", {"momentum": 0.5, "name": "mine"}),
        ("nadam", {"learning_rate": schedules.CosineDecay(0.1, 10)}),
    ):
        optimizer = OPTIMIZERS[name](**options)
        optimizer.build(variables)
        optimizer.build(variables)  # which they have been already
        paths[name] = [variable.path for variable in optimizer.variables]
    names = ("dense_kernel", "dense_bias")
    assert paths["adam"] == [
        "adam/iteration",
        "adam/learning_rate",
        *(f"adam/{name}_gradient_accumulator" for name in names),
        *(f"adam/{name}_{slot}" for name in names for slot in ("momentum", "velocity")),
        *(f"adam/{name}_velocity_hat" for name in names),
    ]
    assert paths["rmsprop"] == [
        "mine/iteration",
        "mine/learning_rate",
        *(f"mine/{name}_{slot}" for slot in ("velocity", "momentum") for name in names),
    ]
    slots = [f"nadam/{name}_{slot}" for name in names for slot in ("momentum", "velocity")]
    assert paths["nadam"] == ["nadam/iteration", *slots, "nadam/u_product"]
    assert {slot: value.shape for slot, value in optimizer._slots_of(variables[0]).items()} == {
        "momentum": (3, 2),
        "velocity": (3, 2),
    }


def test_which_variables_are_updated():
    a, b = named("a/kernel", [1.0]), named("b/kernel", [1.0])
    optimizer, grad = SGD(0.5), np.ones(1)
    with pytest.raises(ConfigError, match="must already be built on a list of variables"):
        optimizer.apply([grad])
    assert int(optimizer.apply_gradients(zip([grad, grad], [a, b], strict=True))) == 1
    optimizer.apply([grad, grad])
    assert (list(a.numpy()), list(b.numpy())) == ([0.0], [0.0])
    with pytest.warns(UserWarning, match=r"Gradients do not exist for variables \['a/kernel'\] when minimizing"):
        optimizer.apply([None, grad])
    assert (list(a.numpy()), list(b.numpy())) == ([0.0], [-0.5])
    with pytest.raises(ConfigError, match="No gradients provided for any variable"):
        optimizer.apply([None, None])
    with pytest.raises(ConfigError, match="Received a list of 1 gradients, but the optimizer is tracking 2"):
        optimizer.apply([grad])
    with pytest.raises(ConfigError, match=r"Unknown variable: <variable c/kernel .*only be called for the variables"):
        optimizer.apply([grad], [named("c/kernel", [1.0])])
    optimizer.apply([])
    assert int(optimizer.iterations) == 3, "without gradients there is no update"


def test_gradients_are_cast_to_their_variables():
    kernel = named("a/kernel", [1.0], "float32")
    Adam().apply([np.array([0.5], np.float64)], [kernel])
    assert kernel.dtype == np.float32


EVERYTHING = {
    "weight_decay": 0.1,
    "clipnorm": 2.0,
    "gradient_accumulation_steps": 3,
    "use_ema": True,
    "ema_momentum": 0.5,
    "ema_overwrite_frequency": 7,
    "name": "mine",
}
OWN = {
    "sgd": {"momentum": 0.5, "nesterov": True},
    "rmsprop": {"rho": 0.5, "momentum": 0.5, "epsilon": 1e-3, "centered": True},
    "adam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3, "amsgrad": True},
    "adamw": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3, "amsgrad": True},
    "adagrad": {"initial_accumulator_value": 0.5, "epsilon": 1e-3},
    "adadelta": {"rho": 0.5, "epsilon": 1e-3},
    "adamax": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3},
    "nadam": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3},
    "lion": {"beta_1": 0.5, "beta_2": 0.75},
    "adafactor": {"beta_2_decay": -0.5, "epsilon_2": 1e-2, "clip_threshold": 2.0, "relative_step": False},
    "ftrl": {"learning_rate_power": -0.25, "initial_accumulator_value": 0.5, "beta": 0.5},
    "lamb": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3},
    "muon": {"ns_steps": 3, "nesterov": False, "exclude_layers": ["head"], "rms_rate": None, "momentum": 0.5},
    "schedulefreeadamw": {"beta_1": 0.5, "beta_2": 0.75, "epsilon": 1e-3, "warmup_steps": 5},
}


RECENT = ["adafactor", "ftrl", "lamb", "muon", "schedulefreeadamw"]


def test_every_optimizer_is_tested():
    assert set(OPTIMIZERS) == set(OWN), "add options of its own to OWN"
    assert set(OPTIMIZERS) == {*RULES, *RECENT}, "add its rule in NumPy to references.py"


# What no rule has: it says which variables follow Adam, whose paths have "embedding" in them.
ELSEWHERE = {"exclude_embeddings"}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_option_of_an_optimizer_is_one_of_a_rule(name):
    of_all = inspect.signature(optimizers.Optimizer).parameters.keys()
    own = inspect.signature(OPTIMIZERS[name]).parameters.keys() - of_all - {"options"} - ELSEWHERE
    assert own <= {option for rule in RULES[name] for option in rule.options}


def regression(optimizer):
    """Return a program of a step of a regression, and the values of its rows."""
    rng = np.random.default_rng(6)
    values = {"x": rng.standard_normal((11, 4)), "y": rng.standard_normal((11, 6))}
    kernel, bias = named("dense/kernel", rng.standard_normal((4, 6))), named("dense/bias", np.zeros(6))

    def regress(x, y):
        loss = ops.mean(ops.square(ops.matmul(x, kernel) + bias - y))
        kernel._gradient = bias._gradient = None
        loss.backward()
        optimizer.apply([kernel.value.grad, bias.value.grad], [kernel, bias])
        return {"loss": loss}

    rows = {name: ((Dim.rows(11), *value.shape[1:]), "float64") for name, value in values.items()}
    return trace(regress, rows), values


@pytest.mark.parametrize("options", [{}, {"clipnorm": 0.3, "weight_decay": 0.1, "gradient_accumulation_steps": 2}])
@pytest.mark.parametrize("name", RECENT)
def test_recent_optimizers_on_ranks_and_meshes(name, options):
    """Sums over whole weights are those of all parts, where a mesh divides weights and slots."""
    program, values = regression(OPTIMIZERS[name](0.05, **OWN[name], **options))
    state = {variable: variable.numpy() for variable in program.state}
    for shards in ([4, 4, 3], [0, 11]):
        (full, expected), placed = evaluate(program, values, state), place(program)
        for outputs, actual in run_on_ranks(placed, values, shards, {"x": 0, "y": 0})[0]:
            np.testing.assert_allclose(outputs["loss"], full["loss"], rtol=1e-12)
            for variable, value in expected.items():
                np.testing.assert_allclose(actual[variable], value, rtol=1e-10, atol=1e-12, err_msg=variable.path)
    assert_same_on_mesh(program, values, spread(program), VirtualMesh([4, 7], model=2))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("name", RECENT)
def test_a_traced_program_of_recent_optimizers_has_the_bits_of_eager_steps(name, dtype):
    results, gradients = [], gradients_of(dtype, 7)
    for mode in ("eager", "traced"):
        optimizer, variables = OPTIMIZERS[name](**OWN[name]), two_variables(dtype)
        program = traced(optimizer, variables) if mode == "traced" else None
        for grads in gradients:
            optimizer.apply(grads, variables) if program is None else step(program, grads)
        results.append([variable.numpy() for variable in (*variables, *optimizer.variables)])
    for array, other in zip(*results, strict=True):
        assert array.tobytes() == other.tobytes()
        assert np.isfinite(array).all()


@pytest.mark.parametrize("own_step", [False, True])
def test_schedule_free_begins_with_the_weights_as_they_are(own_step):
    """Also with those that become trainable between two trainings, whose values are on the device then."""

    class Own(dp.Sequential):
        def train_step(self, data):
            return super().train_step(data)

    stack = [dp.layers.Dense(3, input_shape=(2,)), dp.layers.Dense(1)]
    model = Own(stack) if own_step else dp.Sequential(stack)
    model.compile(dp.optimizers.ScheduleFreeAdamW(1e-4, weight_decay=0.5), "mse", jit_compile=False)
    model.layers[0].trainable = False
    for trained in (stack[1:], stack):
        before = [variable.numpy() for layer in trained for variable in layer.weights]
        for layer in trained:
            layer.trainable = True
        model.fit(np.ones((4, 2)), np.ones(4), batch_size=4, verbose=0)
        weights = [variable for layer in trained for variable in layer.weights]
        for weight, old in zip(weights, before, strict=True):
            np.testing.assert_allclose(model.optimizer._slots_of(weight)["momentum"].numpy(), old, atol=0.01)
            np.testing.assert_allclose(weight.numpy(), old, atol=0.01)


def test_muon_steps_are_nearly_orthogonal_and_vectors_follow_adam():
    rng = np.random.default_rng(3)
    kernel, bias, table = (
        Variable(rng.normal(size=shape), path) for shape, path in (((6, 4), "k"), ((4,), "b"), ((5, 4), "embeddings"))
    )
    before = [variable.numpy() for variable in (kernel, bias, table)]
    grads = [rng.normal(size=array.shape) for array in before]
    muon = OPTIMIZERS["muon"](0.1, weight_decay=None, adam_weight_decay=None, ns_steps=10)
    adam = OPTIMIZERS["adam"](0.1)
    twins = [Variable(array, "twin") for array in before[1:]]
    muon.apply(grads, [kernel, bias, table])
    adam.apply(grads[1:], twins)
    for variable, twin in zip((bias, table), twins, strict=True):
        np.testing.assert_allclose(variable.numpy(), twin.numpy(), rtol=1e-12)
    step = (before[0] - kernel.numpy()) / (0.1 * 0.2 * np.sqrt(6))
    values = np.linalg.svd(step, compute_uv=False)
    assert 0.6 < values.min() < values.max() < 1.3


def test_ftrl_sets_weights_to_zero():
    weight = Variable(np.array([0.5, 0.5]), "w")
    ftrl = OPTIMIZERS["ftrl"](0.5, l1_regularization_strength=1.0)
    for _ in range(50):
        ftrl.apply([np.array([0.01, -1.0])], [weight])
    assert weight.numpy()[0] == 0
    assert weight.numpy()[1] > 0.5


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_config_rebuilds_the_optimizer(name):
    rate = schedules.CosineDecay(0.1, 10)
    optimizer = OPTIMIZERS[name](learning_rate=rate, **EVERYTHING, **OWN[name])
    config = optimizer.get_config()
    assert {key: config[key] for key in (*EVERYTHING, *OWN[name])} == EVERYTHING | OWN[name]
    assert config["learning_rate"]["class_name"] == "CosineDecay"
    description = optimizers.serialize(optimizer)
    for restored in (
        optimizers.deserialize(description),
        optimizers.get(description),
        type(optimizer).from_config(config),
    ):
        assert type(restored) is type(optimizer)
        assert restored.get_config() == config
        assert restored.learning_rate == 0.1
    assert description["config"] == config, "not changed by reading it"
    assert optimizers.get(name).get_config() == OPTIMIZERS[name]().get_config()
    assert type(optimizers.get(type(optimizer).__name__)) is type(optimizer)


def test_names_are_those_of_keras():
    names = [OPTIMIZERS[name]().name for name in ("sgd", "rmsprop", "adam", "adamw")]
    assert names == ["sgd", "rm_sprop", "adam", "adam_w"]


class Signs(optimizers.Optimizer):
    """A user's own rule."""

    def update_step(self, gradient, variable, learning_rate):
        variable.assign_sub(ops.sign(gradient) * ops.cast(learning_rate, variable.dtype))


class Heavy(optimizers.Optimizer):
    """A user's own rule with a slot, as one writes it for Keras."""

    def build(self, variables):
        super().build(variables)
        self.momentums = [self.add_variable_from_reference(variable, "momentum") for variable in variables]
        self.places = {variable: place for place, variable in enumerate(variables)}

    def update_step(self, gradient, variable, learning_rate):
        momentum = self.momentums[self.places[variable]]
        momentum.assign(0.9 * momentum - ops.cast(learning_rate, variable.dtype) * gradient)
        variable.assign_add(momentum)


class Scaled(Adam):
    """Arguments of the user's own beside Adam's."""

    def __init__(self, scale=2.0, rule=max, **options):
        super().__init__(**options)
        self.scale, self.rule = scale, rule


def test_arguments_that_are_attributes_make_up_the_configuration():
    config = Scaled(3.0, beta_1=0.5).get_config()
    assert (config["scale"], config["beta_1"], config["amsgrad"]) == (3.0, 0.5, False)
    assert "rule" not in config, "what JSON cannot carry is for a `get_config` of one's own"
    assert Scaled.from_config(config).get_config() == config
    assert list(Adam().get_config())[-4:] == ["beta_1", "beta_2", "epsilon", "amsgrad"]


class Slower(Adam):
    """Variables have rates of their own."""

    def update_step(self, gradient, variable, learning_rate):
        super().update_step(gradient, variable, learning_rate * (0.5 if variable.path == "b/kernel" else 1.0))


def test_a_rule_of_the_users_own():
    assert run(Signs(0.25, clipnorm=1.0), [7.0, -0.1, 0.0]) == [0.75, 1.0, 1.0]
    assert run(Heavy(0.1), [0.5, -1.0]) == pytest.approx(run(SGD(0.1, momentum=0.9), [0.5, -1.0]), rel=1e-14)
    a, b = named("a/kernel", [0.0]), named("b/kernel", [0.0])
    Slower(0.1).apply([np.ones(1), np.ones(1)], [a, b])
    assert float(a.numpy()[0]) == 2 * float(b.numpy()[0]) == pytest.approx(-0.1, rel=1e-5)
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
        (lambda: SGD(use_ema=True, ema_momentum=1.5), r"`ema_momentum` must be in the range \[0, 1\]"),
        (lambda: SGD(use_ema=True, ema_overwrite_frequency=0.5), "`ema_overwrite_frequency` must be an integer >= 1"),
        (lambda: Lion(beta_1=0), "the optimizer degenerates to SignSGD. Received: beta_1=0."),
        (lambda: SGD(momentun=0.9), r"Argument\(s\) not recognized: {'momentun': 0.9}"),
        (lambda: SGD(clipnorm=1, clipvalue=2), "Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be set"),
        (lambda: SGD(clipnorm=float("inf")), "clipnorm = inf: expected a number that is finite"),
        (lambda: SGD(gradient_accumulation_steps=1), "`gradient_accumulation_steps` must be an integer >= 2"),
        (lambda: SGD(gradient_accumulation_steps=2.5), "`gradient_accumulation_steps` must be an integer >= 2"),
        (lambda: AdamW(weight_decay=None), "`weight_decay` must be a float"),
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
        (
            lambda: optimizers.ScheduleFreeAdamW(warmup_steps=0.5),
            "warmup_steps = 0.5: expected an integer of at least 0",
        ),
        (lambda: optimizers.get("rmsprob"), "unknown optimizer 'rmsprob'; did you mean 'rmsprop'"),
    ],
)
def test_refused(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_decay_is_ignored_as_in_keras():
    with pytest.warns(UserWarning, match="`decay` is no longer supported"):
        SGD(decay=0.1)


@pytest.mark.parametrize("options", [{}, {"use_ema": True, "ema_overwrite_frequency": 1}, {"weight_decay": 0.1}])
@pytest.mark.parametrize("kind", [SGD, Adam])
def test_a_variable_that_is_overwritten_with_its_gradient(kind, options):
    scale, kernel = named("dense/scale", [1.0]), named("dense/kernel", [1.0])
    scale.overwrite_with_gradient = True
    optimizer = kind(0.1, clipnorm=0.5, **options)
    optimizer.build([scale, kernel])
    assert not any("scale" in variable.name for variable in optimizer.variables)
    optimizer.apply([np.array([5.0]), np.array([0.0])], [scale, kernel])
    assert scale.numpy() == [5]
    assert kernel.numpy() == pytest.approx(1 if "weight_decay" not in options else 0.99)


def test_a_variable_that_is_overwritten_with_the_mean_of_its_gradients():
    scale = named("dense/scale", [1.0])
    scale.overwrite_with_gradient = True
    optimizer = SGD(0.1, gradient_accumulation_steps=2)
    seen = []
    for gradient in (5.0, 7.0, 1.0, 2.0):
        optimizer.apply([np.array([gradient])], [scale])
        seen.append(float(scale.numpy()[0]))
    assert seen == [1, 6, 6, 1.5]


def test_weights_of_an_optimizer_are_set():
    weight = named("dense/kernel", [2.0, -1.0])
    trained, other = Adam(0.1), Adam(0.1)
    trained.apply([np.float32([1, 2])], [weight])
    with pytest.raises(ConfigError, match="You are calling `set_weights\\(\\)` on an optimizer that has not yet been"):
        other.set_weights(trained.variables)
    other.build([weight])
    other.set_weights(trained.variables)
    for variable, expected in zip(other.variables, trained.variables, strict=True):
        np.testing.assert_array_equal(variable, expected)
    with pytest.raises(ConfigError, match="1 values for 4 variables of adam"):
        other.set_weights([1])


@pytest.mark.parametrize(
    "name",
    [
        *("initial_accumulator_value", "l1_regularization_strength", "l2_regularization_strength"),
        "l2_shrinkage_regularization_strength",
    ],
)
def test_numbers_of_ftrl_are_not_negative(name):
    with pytest.raises(ConfigError, match=rf"^`{name}` needs to be positive or zero\. Received: {name}=-1\.0\.$"):
        OPTIMIZERS["ftrl"](**{name: -1.0})
    with pytest.raises(ConfigError, match=r"^`learning_rate_power` needs to be negative or zero\."):
        OPTIMIZERS["ftrl"](learning_rate_power=0.5)
