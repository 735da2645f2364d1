"""Trains models on meshes of ranks, each in every form; rank 0 saves what came out. Arguments: out.npz STEPS [FORM...].

Without a form each model is trained on one rank. A form is "--shard-weights", "--shard-optimizer", a mesh or both, or
"--stages=2".
"""

import sys

import numpy as np

import dptrain as dp
from dptrain import layers, ops
from dptrain.backend.cpu import compile as compiling
from dptrain.cli.options.mesh import arranged, lay_out
from dptrain.comm import current
from dptrain.distribution import set_distribution
from tests.unit.models.test_gan import build, images

compiling.OPTIONS = ("-O0", *compiling.OPTIONS[1:])  # compiled sooner, to the same bits
RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(100, 12))
IMAGES = RNG.normal(size=(100, 6, 6, 2))
WORDS = RNG.integers(0, 11, (100, 5))
CLASSES = RNG.integers(0, 3, 100)
WEIGHTS = RNG.random(100)


def perceptron():
    stack = [layers.Dense(16, "relu"), layers.BatchNormalization(), layers.Dropout(0.2), layers.Dense(10, "tanh")]
    return dp.Sequential([dp.Input((12,)), *stack, layers.Dense(3, "softmax")]), (ROWS, CLASSES), "adam"


def convnet():
    stack = [layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(8, 2), layers.Flatten()]
    return dp.Sequential([dp.Input((6, 6, 2)), *stack, layers.Dense(3, "softmax")]), (IMAGES, CLASSES), "rmsprop"


def embedding():
    stack = [layers.Embedding(11, 8), layers.Flatten(), layers.Dense(6, "gelu", kernel_regularizer="l2")]
    model = dp.Sequential([dp.Input((5,), dtype="int64"), *stack, layers.Dense(3, "softmax")])
    return model, (WORDS, CLASSES, WEIGHTS), dp.optimizers.AdamW(0.01, global_clipnorm=0.5, use_ema=True)


class Own(dp.Model):
    """A step of its own, with a penalty of all pairs of outputs."""

    def __init__(self):
        super().__init__()
        self.first, self.last = layers.Dense(9, "relu"), layers.Dense(3)

    def call(self, x):
        return self.last(self.first(x))

    def train_step(self, data):
        x, y = data
        logits = self(x, training=True)
        losses = ops.sum(ops.one_hot(y, 3, dtype="float64") * ops.log_softmax(logits), -1)
        loss = -ops.mean(losses) + 0.01 * ops.mean(ops.square(ops.mean(logits, 0)))
        self.zero_grad()
        loss.backward()
        self.optimizer.apply([v.value.grad for v in self.trainable_weights], self.trainable_weights)
        return {"loss": loss}


def own():
    chosen = dp.optimizers.OptimizerMap(dp.optimizers.ScheduleFreeAdamW(0.01), {".*/bias": dp.optimizers.Adam(0.02)})
    return Own(), (ROWS, CLASSES), dp.optimizers.MultiOptimizer(chosen)


def matrices():
    model = dp.Sequential(
        [dp.Input((12,)), layers.Dense(16, "tanh"), layers.Dense(7, "gelu"), layers.Dense(3, "softmax")]
    )
    return model, (ROWS, CLASSES), dp.optimizers.Muon(0.01, global_clipnorm=0.5)


def sequences():
    """Loops, of which stages of a pipeline have one each."""
    stack = [layers.Embedding(11, 8, mask_zero=True), layers.LSTM(6, return_sequences=True, dropout=0.2), layers.GRU(5)]
    model = dp.Sequential([dp.Input((5,), dtype="int64"), *stack, layers.Dense(3, "softmax")])
    return model, (WORDS, CLASSES, WEIGHTS), "adam"


def low_rank():
    """LoRA, of the last layer only after the model was compiled and trained."""
    stack = [layers.Embedding(11, 8, lora_rank=2), layers.Flatten(), layers.Dense(6, "gelu", lora_rank=3, lora_alpha=6)]
    model = dp.Sequential([dp.Input((5,), dtype="int64"), *stack, layers.Dense(4), layers.Dense(3, "softmax")])
    return model, (WORDS, CLASSES, WEIGHTS), "adam"


MODELS = {"perceptron": perceptron, "convnet": convnet, "embedding": embedding, "own step": own, "matrices": matrices}
MODELS |= {"sequences": sequences, "low rank": low_rank}


def trained(name, flags, steps):
    """Return weights, losses and predictions of a model after so many steps."""
    dp.utils.set_random_seed(5)
    options_given = [flag[2:].replace("-", "_").partition("=") for flag in flags if flag.startswith("--")]
    sharded = {name: int(number) if number else True for name, _, number in options_given}
    mesh = next((flag for flag in flags if not flag.startswith("--")), None)
    if mesh is not None:
        arranged(mesh, current())
    # Compiled steps of sharded variables agree to the bit, see shards.py.
    jit_compile = name in ("perceptron", "sequences") and flags in (["model=2"], ["--stages=2"])
    compiled = {"dtype": "float64", "jit_compile": jit_compile, **sharded}
    if name == "GAN":
        model, data = build(**compiled), (images(),)
    else:
        model, data, optimizer = MODELS[name]()
        model.compile(optimizer, "sparse_categorical_crossentropy", **compiled)
    x, y, *weights = (*data, None) if len(data) == 1 else data
    if mesh is not None:
        if name == "own step":
            model.build((None, 12))
        lay_out(model)
    # 31 rows, and 7 at the end, are never as many on two replicas, nor in microbatches.
    fit = {"batch_size": 8 if name == "GAN" else 31, "epochs": -(-steps // 4), "verbose": 0}  # of four steps or less
    history = model.fit(x, y, sample_weight=weights[0] if weights else None, **fit).history
    if name == "low rank":
        model.layers[-2].enable_lora(2)
        history |= model.fit(x, y, **fit).history
    arrays = {f"{name}/{number}": weight for number, weight in enumerate(model.get_weights())}
    arrays |= {f"{name}/{key}": np.array(losses) for key, losses in history.items()}
    if name != "GAN":
        arrays[f"{name}/prediction"] = model.predict(x[:7], verbose=0)
    set_distribution(None)
    return arrays


if __name__ == "__main__":
    out, steps, *forms = sys.argv[1:]
    arrays = {}
    for form in forms or [""]:
        for name in (*MODELS, "GAN"):
            arrays |= {f"{form}|{key}": array for key, array in trained(name, form.split(), int(steps)).items()}
    if current().rank == 0:
        np.savez(out, **arrays)
