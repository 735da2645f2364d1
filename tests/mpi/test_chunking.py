"""Logits computed in chunks of positions: trainings on ranks with uneven rows equal one of whole logits on one rank."""

import json

import numpy as np

from tests.launching import mpirun

SCRIPT = """
import json, sys
import numpy as np, dptrain as dp
from dptrain import layers
from dptrain.train import chunking

if sys.argv[1] == "chunked":
    chunking.LEAST_LOGITS, chunking.CHUNK = 1, 40 * 4
dp.config.set_floatx("float64")
dp.utils.set_random_seed(0)
x = np.random.default_rng(0).integers(0, 40, (9, 12))
model = dp.Sequential([layers.Input((12,), dtype="int32"), layers.Embedding(40, 4), layers.Dense(40)])
loss = dp.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(dp.optimizers.Adam(0.01, global_clipnorm=1.0), loss, metrics=["accuracy"], device="cpu")
history = model.fit(x, x[::-1], batch_size=5, epochs=2, verbose=0).history
weights = [weight.tolist() for weight in model.get_weights()]
from dptrain.program.body import has_body
programs = model._programs._placed.values()
loops = sum(any(map(has_body, program.tensors)) for program in programs)
if dp.rank() == 0:
    print(json.dumps([history["loss"], history["accuracy"], *weights, loops]))
"""


def test_on_ranks(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    *whole, none = json.loads(mpirun(1, str(script), "whole").out)
    assert none == 0
    for ranks in (2, 3):
        *chunked, loops = json.loads(mpirun(ranks, str(script), "chunked").out)
        assert loops
        for a, b in zip(whole, chunked, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-14)
