"""Trainings in a loop of one's own, of functions of all variables' values: as Keras' guides for JAX write them."""

import numpy as np
import pytest

import dptrain as dp

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of Keras' variables
STEPS, ROWS = 20, 8
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((STEPS, ROWS, 5)), RNG.standard_normal((STEPS, ROWS, 2))


def sequential(k):
    """Return a stack of layers."""
    L = k.layers
    hidden = L.Dense(6, "tanh", kernel_regularizer="l2")
    return k.Sequential([k.Input((5,)), hidden, L.BatchNormalization(momentum=0.8), L.Dense(2)])


def functional(k):
    """Return a graph with a branch and a shared layer."""
    L = k.layers
    x = k.Input((5,))
    shared, normalize = L.Dense(5, "tanh", kernel_regularizer="l1"), L.BatchNormalization(momentum=0.7)
    return k.Model(x, L.Dense(2)(L.add([normalize(shared(x)), shared(shared(x))])))


def nested(k):
    """Return a model of models, one of which is frozen."""
    L = k.layers
    x = k.Input((5,))
    inner = k.Sequential([k.Input((5,)), L.Dense(4, "relu"), L.BatchNormalization(momentum=0.6)])
    frozen = k.Sequential([k.Input((4,)), L.Dense(3, "tanh"), L.BatchNormalization()])
    frozen.trainable = False
    return k.Model(x, L.Dense(2, activity_regularizer="l2")(frozen(inner(x))))


def recurrent(k):
    """Return a model whose weights are read in a loop."""
    L = k.layers
    return k.Sequential([k.Input((5,)), L.Reshape((5, 1)), L.GRU(3), L.BatchNormalization(), L.Dense(2)])


def subclassed(k):
    """Return a model with a `call`, which adds to the loss."""

    class Net(k.Model):
        def __init__(self):
            super().__init__()
            self.hidden, self.normalize = k.layers.Dense(6, "relu"), k.layers.BatchNormalization(momentum=0.9)
            self.out = k.layers.Dense(2)

        def call(self, x, training=False):
            hidden = self.normalize(self.hidden(x), training=training)
            self.add_loss(0.1 * k.ops.mean(k.ops.square(hidden * self.hidden.bias)))
            return self.out(hidden)

    net = Net()
    net(X[0])
    return net


def step_of(k, model, optimizer):
    """Return a function of the state and a batch that returns the new state, loss and outputs."""

    def loss_of(trained, others, x, y):
        y_pred, others, losses = model.stateless_call(trained, others, x, training=True, return_losses=True)
        return k.ops.mean(k.ops.square(y - y_pred)) + sum(losses), (y_pred, others)

    def step(state, x, y):
        trained, others, slots = state
        loss, (y_pred, others), grads = derived(k, loss_of, trained, others, x, y)
        trained, slots = optimizer.stateless_apply(slots, grads, trained)
        return (trained, others, slots), loss, y_pred

    if k is dp or k.backend.backend() != "jax":
        return step
    import jax

    return jax.jit(step)


def derived(k, function, trained, *arguments):
    """Return a function's loss, what it returns beside it, and the loss's gradients."""
    if k is dp:
        trained = [dp.ops.convert_to_tensor(value) for value in trained]
        with dp.GradientTape() as tape:
            tape.watch(trained)
            loss, others = function(trained, *arguments)
        return loss, others, tape.gradient(loss, trained)
    if k.backend.backend() == "jax":
        import jax

        (loss, others), grads = jax.value_and_grad(function, has_aux=True)(trained, *arguments)
        return loss, others, grads
    import torch

    leaves = [torch.tensor(np.array(value), requires_grad=True) for value in trained]
    loss, others = function(leaves, *map(torch_tensors, arguments))
    grads = torch.autograd.grad(loss, leaves)
    detached = [value.detach() for value in others[1]]
    return loss.detach(), (others[0].detach(), detached), grads


def torch_tensors(value):
    """Return an array, or the values in a list, as PyTorch's tensors."""
    import torch

    if isinstance(value, list):
        return [torch_tensors(part) for part in value]
    return torch.tensor(np.array(value))


@pytest.mark.parametrize("build", [sequential, functional, nested, recurrent, subclassed], ids=lambda f: f.__name__)
def test_a_loop_of_functions(keras, build):
    results, start = [], None
    for k in (keras, dp):
        if k is dp:
            dp.config.set_floatx("float64")
        try:
            model, optimizer = build(k), k.optimizers.Adam(0.01)
            start = start or model.get_weights()
            model.set_weights(start)
            optimizer.build(model.trainable_variables)
            before = [np.array(variable) for variable in (*model.variables, *optimizer.variables)]
            state = tuple(
                [np.array(variable) for variable in variables]
                for variables in (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
            )
            step, losses, outputs = step_of(k, model, optimizer), [], []
            for x, y in zip(X, Y, strict=True):
                state, loss, y_pred = step(state, x, y)
                losses.append(float(loss))
                outputs.append(np.array(y_pred))
            for value, variable in zip(before, (*model.variables, *optimizer.variables), strict=True):
                np.testing.assert_array_equal(np.array(variable), value)
        finally:
            dp.config.set_floatx("float32")
        # Random states differ.
        numbers = [np.array(value) for values in state for value in values if np.array(value).dtype.kind == "f"]
        results.append((losses, outputs, numbers))
    (their_losses, their_outputs, their_state), (losses, outputs, state) = results
    np.testing.assert_allclose(losses, their_losses, rtol=1e-9)
    np.testing.assert_allclose(outputs, their_outputs, rtol=1e-7, atol=1e-9)
    assert len(state) == len(their_state)
    for mine, theirs in zip(state, their_state, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-7, atol=1e-9)


def test_losses_and_metrics_of_given_values(keras):
    results, start = [], None
    for k in (keras, dp):
        if k is dp:
            dp.config.set_floatx("float64")
        try:
            model = sequential(k)
            start = start or model.get_weights()
            model.set_weights(start)
            model.compile("sgd", "mse")
            trained = [1.5 * np.array(variable) for variable in model.trainable_variables]
            others = [np.array(variable) for variable in model.non_trainable_variables]
            totals = [np.array(variable) for variable in model.metrics_variables]
            y_pred, others = model.stateless_call(trained, others, X[0], training=True)
            loss, (same, others, totals) = model.stateless_compute_loss(
                trained, others, totals, x=X[0], y=Y[0], y_pred=y_pred
            )
            assert same is trained
            metric = k.metrics.MeanAbsoluteError()
            state = metric.stateless_update_state(metric.stateless_reset_state(), Y[0], y_pred)
            results.append([float(loss), float(metric.stateless_result(state)), *map(np.array, others)])
        finally:
            dp.config.set_floatx("float32")
    for mine, theirs in zip(*results, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-9)
