"""Models that become sparse while they are trained."""

import numpy as np
import pytest

import dptrain as dp
from dptrain import layers, pruning
from dptrain.errors import ConfigError
from dptrain.pruning import ConstantSparsity, PolynomialDecay, prune_low_magnitude

rng = np.random.default_rng(0)
X = rng.normal(size=(96, 8))
Y = rng.integers(0, 4, 96)


def network(optimizer="adam", **options):
    """Return a model with a kernel that is a matrix, and 24 steps of 3 epochs."""
    model = dp.Sequential([layers.Input((8,)), layers.Dense(16, "relu", name="a"), layers.Dense(4, name="b")], seed=3)
    loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, **{"device": "cpu", "dtype": "float64", "jit_compile": False, **options})
    return model


def train(model, **options):
    return model.fit(X, Y, **{"batch_size": 12, "epochs": 3, "verbose": 0, **options}).history


def zeros(model):
    return [float(np.mean(weight == 0)) for weight in model.get_weights()]


def same(model, other):
    assert [a.tobytes() for a in model.get_weights()] == [b.tobytes() for b in other.get_weights()]


def polynomial(final=0.75, **options):
    return PolynomialDecay(0.0, final, 2, 20, **{"frequency": 3, **options})


@pytest.mark.parametrize(
    "optimizer",
    [
        "adam",
        dp.optimizers.SGD(0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
        dp.optimizers.Muon(),
        dp.optimizers.Adafactor(),
        dp.optimizers.Adam(use_ema=True, ema_overwrite_frequency=4),
        dp.optimizers.Adam(gradient_accumulation_steps=2, global_clipnorm=0.1),
        dp.optimizers.LossScaleOptimizer(dp.optimizers.RMSprop()),
        dp.optimizers.MultiOptimizer(dp.optimizers.OptimizerMap(dp.optimizers.ScheduleFreeAdamW())),
    ],
    ids=["adam", "sgd", "muon", "adafactor", "ema", "accumulation", "loss scale", "schedule free, by several"],
)
def test_zeros_stay_through_every_update(optimizer):
    steps_per_update = (
        optimizer.gradient_accumulation_steps or 1 if isinstance(optimizer, dp.optimizers.Optimizer) else 1
    )
    schedule = PolynomialDecay(0.0, 0.75, 2, 20 // steps_per_update, frequency=3)
    model = prune_low_magnitude(network(optimizer), schedule)
    history = train(model)
    assert zeros(model) == [0.75, 0, 0.75, 0]
    assert not any(np.signbit(weight[weight == 0]).any() for weight in model.get_weights())  # +0, as exported
    updates = [epoch * 8 // steps_per_update for epoch in (1, 2, 3)]
    last = [max(step for step in range(update + 1) if schedule(step)[0]) for update in updates]
    assert history["sparsity"] == pytest.approx([schedule.sparsity(step) for step in last], abs=1 / 96)
    mask = model.optimizer._masks[model.layers[0].kernel].numpy()
    np.testing.assert_array_equal(mask != 0, model.layers[0].kernel.numpy() != 0)
    for name, slot in model.optimizer._slots_of(model.layers[0].kernel).items():
        if name in ("momentum", "average", "gradient_accumulator"):
            assert not slot.numpy()[mask == 0].any()


@pytest.mark.parametrize(
    "options",
    [{"run_eagerly": True}, {"steps_per_execution": 1}, {"jit_compile": True, "steps_per_execution": 8}],
    ids=["eager", "one by one", "compiled, many together"],
)
def test_however_steps_are_executed(options):
    actual, expected = network(**options), network()
    for model in (actual, expected):
        prune_low_magnitude(model, polynomial(), regrowth=0.3)
        train(model)
    for weight, other in zip(actual.get_weights(), expected.get_weights(), strict=True):
        np.testing.assert_allclose(weight, other, rtol=1e-9, atol=1e-12)


def test_a_constraint_keeps_zeros():
    model = dp.Sequential([layers.Input((8,)), layers.Dense(4, kernel_constraint=lambda w: w + 1.0)])
    model.compile("sgd", "mse", device="cpu", jit_compile=False)
    prune_low_magnitude(model)
    model.fit(X, np.eye(4)[Y], verbose=0)
    assert zeros(model)[0] == 0.5


def test_all_weights_together_or_each():
    layerwise, together = network(), network()
    prune_low_magnitude(layerwise, ConstantSparsity(0.5, 4))
    prune_low_magnitude(together, ConstantSparsity(0.5, 4), global_unstructured=True)
    for model in (layerwise, together):
        model.layers[1].kernel.assign(10 * model.layers[1].kernel.numpy())
        train(model)
    assert zeros(layerwise) == [0.5, 0, 0.5, 0]
    first, _, second, _ = zeros(together)
    assert second < 0.2 < 0.5 < first
    assert pruning.sparsity(together) == 0.5


def test_blocks_and_two_of_four():
    blocks, fine = network(), network()
    prune_low_magnitude(blocks, ConstantSparsity(0.5, 4), (4, 2))
    prune_low_magnitude(fine, ConstantSparsity(0.0, 4), sparsity_m_by_n=(2, 4))
    train(blocks)
    train(fine)
    kernel = blocks.layers[0].kernel.numpy().reshape(2, 4, 8, 2) != 0
    assert set(kernel.sum((1, 3)).reshape(-1).tolist()) == {0, 8}
    kernel = fine.layers[0].kernel.numpy().reshape(2, 4, 16) != 0
    assert (kernel.sum(1) == 2).all()


@pytest.mark.parametrize("options", [{"sparsity_m_by_n": (2, 4)}, {"block_size": (2, 2)}, {"regrowth": 0.3}])
def test_half_precision(options):
    model = prune_low_magnitude(network(dtype="bfloat16"), ConstantSparsity(0.5, 4, frequency=4), **options)
    assert train(model)["sparsity"] == [0.5] * 3
    assert model.layers[0].kernel.dtype.name == "bfloat16"
    assert model.optimizer._masks[model.layers[0].kernel].numpy().astype(float).mean() == 0.5


def test_regrowth_finds_other_connections():
    results = []
    for end in (-1, 8, 4):
        model = prune_low_magnitude(network(), ConstantSparsity(0.75, 0, end, 4), regrowth=0.5)
        for steps in (3, 2):
            train(model, epochs=1, steps_per_epoch=steps)
            results.append(model.optimizer._masks[model.layers[0].kernel].numpy() != 0)
    before, constant, _, half, _, ended = results
    assert [mask.sum() for mask in (before, constant, half, ended)] == [32] * 4
    assert (before == ended).all()  # at the schedule's end the cosine is 0
    assert 8 < (before & ~constant).sum() <= 16
    assert 0 < (before & ~half).sum() <= 8


def test_layers_by_name_and_before_they_are_built():
    model = prune_low_magnitude(network(), ConstantSparsity(0.5, 0), layers=["b"])
    train(model, epochs=1)
    assert zeros(model) == [0, 0, 0.5, 0]
    model = dp.Sequential([prune_low_magnitude(layers.Dense(16), ConstantSparsity(0.25, 0)), layers.Dense(4)])
    model.compile("sgd", "mse", device="cpu", jit_compile=False)
    model.fit(X, np.eye(4)[Y], verbose=0)
    assert zeros(model) == [0.25, 0, 0, 0]


def test_what_is_not_pruned():
    model = dp.Sequential(
        [
            layers.Input((8, 8, 1)),
            layers.Conv2D(4, 3, name="conv"),
            layers.BatchNormalization(),
            layers.PReLU(),
            layers.LayerNormalization(axis=(1, 2, 3)),
            layers.Flatten(),
            layers.Dense(4, trainable=False),
            layers.Dense(2),
        ]
    )
    prune_low_magnitude(model)
    assert [weight._path for weight in model.weights if weight.pruning] == ["conv/kernel", "dense_1/kernel"]


def test_sparsity_of_a_model_without_kernels():
    assert pruning.sparsity(dp.Sequential([layers.Input((4,)), layers.ReLU()])) == 0


def test_stripped():
    model = prune_low_magnitude(network(), ConstantSparsity(0.5, 0))
    train(model)
    assert zeros(model)[0] == 0.5
    pruning.strip_pruning(model)
    assert zeros(model)[0] == 0.5  # real ones
    assert "sparsity" not in train(model)
    assert zeros(model)[0] == 0


def test_files_hold_zeros(tmp_path):
    model = prune_low_magnitude(network(), polynomial())
    train(model)
    model.save(tmp_path / "m.keras")
    model.save_weights(tmp_path / "m.weights.h5")
    loaded = dp.models.load_model(tmp_path / "m.keras", device="cpu", jit_compile=False)
    same(loaded, model)
    # Trained on, with the masks that the zeros say, and the optimizer's state.
    prune_low_magnitude(loaded, polynomial())
    for pruned_model in (loaded, model):
        train(pruned_model, initial_epoch=3, epochs=4)
    same(loaded, model)
    assert zeros(loaded) == [0.75, 0, 0.75, 0]


def test_interrupted_and_resumed(tmp_path):
    class Stop(dp.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            if self._trainer.steps_done == 13:
                raise KeyboardInterrupt

    def pruned():
        return prune_low_magnitude(network(), polynomial(), regrowth=0.4)

    straight, first, second = pruned(), pruned(), pruned()
    train(straight)
    for save_freq, folder in ((5, "between"), (2, "on an update")):
        first, second = pruned(), pruned()
        backup = [dp.callbacks.BackupAndRestore(tmp_path / folder, save_freq=save_freq)]
        with pytest.raises(KeyboardInterrupt):
            train(first, callbacks=[*backup, Stop()])
        train(second, callbacks=[dp.callbacks.BackupAndRestore(tmp_path / folder, save_freq=save_freq)])
        same(second, straight)
    with pytest.raises(KeyboardInterrupt):
        train(pruned(), callbacks=[dp.callbacks.BackupAndRestore(tmp_path / "b", save_freq=5), Stop()])
    other = prune_low_magnitude(network(), polynomial(0.5), regrowth=0.4)
    with pytest.raises(ConfigError, match=r"pruning\.a/kernel\.schedule: .*0.75.*0.5"):
        train(other, callbacks=[dp.callbacks.BackupAndRestore(tmp_path / "b", save_freq=5)])


def test_a_loop_of_ones_own():
    loop, fit = (prune_low_magnitude(network(), ConstantSparsity(0.5, 0, frequency=3)) for _ in range(2))
    update = pruning.UpdatePruningStep()
    update.set_model(loop)
    update.on_epoch_begin(0)
    for start in range(0, 96, 12):
        loop.train_on_batch(X[start : start + 12], Y[start : start + 12])
        update.on_train_batch_end(0)
    logs = {}
    update.on_epoch_end(0, logs)
    assert logs == {"sparsity": 0.5}
    train(fit, epochs=1, shuffle=False)
    same(loop, fit)


class OwnStep(dp.Model):
    """Two optimizers, whose slots its first step makes."""

    def __init__(self):
        super().__init__()
        self.one, self.two = layers.Dense(4, name="one"), layers.Dense(4, name="two")
        self.first, self.second = dp.optimizers.SGD(0.1), dp.optimizers.Adam()

    def call(self, inputs):
        return self.two(self.one(inputs))

    def train_step(self, data):
        x, y = data
        loss = dp.ops.mean((self(x, training=True) - y) ** 2)
        self.zero_grad()
        loss.backward()
        for optimizer, layer in ((self.first, self.one), (self.second, self.two)):
            weights = layer.trainable_weights
            optimizer.apply([weight.value.grad for weight in weights], weights)
        return {"loss": loss}


@pytest.mark.parametrize("as_batches", [False, True])
def test_steps_and_optimizers_of_ones_own(as_batches):
    model = OwnStep()
    model.build((None, 8))
    model.compile(device="cpu", jit_compile=False)
    prune_low_magnitude(model, ConstantSparsity(0.5, 0))
    targets = np.eye(4)[Y]
    data = (X, targets)
    if as_batches:
        data = ((X[n : n + 12], targets[n : n + 12]) for n in [*range(0, 96, 12)] * 2), None
    history = model.fit(*data, epochs=2, steps_per_epoch=8, shuffle=False, verbose=0).history
    assert history["sparsity"] == [0.5, 0.5]
    assert zeros(model) == [0.5, 0, 0.5, 0]


def refused(message, *arguments, model=None, **options):
    with pytest.raises(ConfigError, match=message):
        prune_low_magnitude(model or network(), *arguments, **options)


def test_refused():
    refused("unknown layer 'bb'; did you mean 'b'", layers=["bb"])
    refused(r"regrowth = 1\.0: expected a fraction above 0 and below 1", regrowth=1.0)
    refused("block_size = .*: expected rows and columns", None, (0, 4))
    refused("block_pooling_type = 'SUM'", None, (2, 2), "SUM")
    refused("expected m zeros of n", sparsity_m_by_n=(4, 4))
    refused("pruning 2:4 determines the remaining", sparsity_m_by_n=(2, 4), regrowth=0.3)
    refused("pruning 2:4 determines the remaining", sparsity_m_by_n=(2, 4), global_unstructured=True)
    refused("expected a PruningSchedule, found float", 0.5)
    refused("no layer has a trainable kernel", model=dp.Sequential([layers.Input((4,)), layers.ReLU()]))
    refused("expected a model, a layer or a list of layers, found int", model=7)
    refused(
        r"pruning 1:3 of layer 'a': its kernel of shape \(8, 16\) has 8 inputs, not a multiple of 3",
        sparsity_m_by_n=(1, 3),
    )
    layer = prune_low_magnitude(layers.Dense(4), sparsity_m_by_n=(1, 3))
    with pytest.raises(ConfigError, match="has 8 inputs, not a multiple of 3"):
        layer.build((None, 8))
