"""A loss that is no sum over samples has the value of one process on any number of ranks, in evaluation too."""

import json

import numpy as np

from tests.launching import mpirun

SCRIPT = """
import json, sys
import numpy as np, dptrain as dp
rng = np.random.default_rng(0)
x, y = rng.standard_normal((53, 6)), rng.integers(0, 4, 53)
model = dp.Sequential([dp.layers.Dense(5, "tanh", input_shape=(6,)), dp.layers.Dense(4, "softmax")], seed=3)
loss = dp.losses.SparseCategoricalCrossentropy(ignore_class=2)
model.compile("adam", loss, metrics=["accuracy"], dtype="float64", device="cpu")
history = model.fit(x, y, batch_size=8, epochs=2, verbose=0, validation_data=(x[:30], y[:30])).history
found = [history, model.evaluate(x, y, batch_size=7, verbose=0), model.evaluate(x, y, steps=3, verbose=0)]
if dp.rank() == 0:
    print(json.dumps(found))
"""


def test_ignored_classes(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    alone, together = (mpirun(ranks, str(script)) for ranks in (1, 3))
    assert (alone.code, alone.err, together.code, together.err) == (0, "", 0, "")
    (count, *values), (expected_count, *others) = json.loads(alone.out), json.loads(together.out)
    for key in count:
        np.testing.assert_allclose(expected_count[key], count[key], rtol=1e-11, err_msg=key)
    np.testing.assert_allclose(others, values, rtol=1e-11)
