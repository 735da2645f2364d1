"""Losses of pairs of a batch's rows train, evaluate and predict on three ranks what they do on one."""

import json

import numpy as np

from tests.launching import mpirun

SCRIPT = """
import json, sys
import numpy as np, dptrain as dp
from dptrain import ops

class Towers(dp.Model):
    def __init__(self):
        super().__init__()
        glorot = dp.initializers.GlorotUniform
        self.image, self.text = (dp.layers.Dense(5, kernel_initializer=glorot(seed)) for seed in (1, 2))

    def call(self, x):
        a, b = (tower(part) for tower, part in ((self.image, x[:, :4]), (self.text, x[:, 4:])))
        return ops.stack([part / ops.sqrt(ops.sum(ops.square(part), -1, keepdims=True) + 1e-9) for part in (a, b)], 1)

def clip(y, pairs):
    logits = 4 * pairs[:, 0] @ ops.transpose(pairs[:, 1])
    own, entropy = ops.arange(ops.shape(logits)[0]), ops.sparse_categorical_crossentropy
    return (entropy(own, logits, from_logits=True) + entropy(own, ops.transpose(logits), from_logits=True)) / 2

class Attention(dp.Model):
    def call(self, x):
        return ops.softmax(x @ ops.transpose(x)) @ x

class Pairs(dp.Model):
    def call(self, x):
        return x @ ops.transpose(x)

x = np.random.default_rng(0).standard_normal((53, 7))
dp.config.set_floatx("float64")
model = Towers()
model.compile(dp.optimizers.SGD(0.5, momentum=0.9), clip, device="cpu")
history = model.fit(x, x[:, :1], batch_size=17, epochs=3, verbose=0).history
results = [history["loss"], model.evaluate(x, x[:, :1], batch_size=3, verbose=0)]
results += [Attention().predict(x, batch_size=17, verbose=0).tolist()]
results += [Pairs().predict(x[:34], batch_size=17, verbose=0).tolist()]
try:
    Pairs().predict(x, batch_size=17, verbose=0)
except Exception as error:
    results.append(str(error))
if dp.rank() == 0:
    print(json.dumps(results))
"""


def test_on_three_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone, together = (mpirun(ranks, str(script)) for ranks in (1, 3))
    assert (alone.code, alone.err, together.code, together.err) == (0, "", 0, "")
    *values, message = json.loads(alone.out)
    *others, other_message = json.loads(together.out)
    assert len(values[0]) == 3
    for value, other in zip(values, others, strict=True):
        np.testing.assert_allclose(other, value, rtol=1e-12, atol=1e-13)
    assert message in other_message
    assert "'output' has the shape (17,) for each of the 17 samples of the first batch and (2,) in one of 2" in message
