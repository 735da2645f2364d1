"""Trains on batches of many lengths by shared C++, and again by a text of its own for each; saves rank 0's numbers.

Arguments: out.npz MODEL, of `tests/lengths.py`.
"""

import sys

import numpy as np

from dptrain.comm import current
from tests.lengths import batch, model_of, texts

LENGTHS = (19, 20, 21, 22, 23)
out, name = sys.argv[1:]


def trained():
    """Return logs, scores, predictions and weights after two epochs of batches of 7 rows."""
    model = model_of(name)
    data = [batch(length, len(model.output_shape) == 3, rows=7) for length in LENGTHS]
    logs = model.fit(
        (pair for _ in range(2) for pair in data), epochs=2, steps_per_epoch=len(data), shuffle=False, verbose=0
    )
    results = [np.array(list(logs.history.values()))]
    for x, y in data[-2:]:
        results += [np.array(model.evaluate(x, y, batch_size=4, verbose=0)), model.predict(x, batch_size=4, verbose=0)]
    return [*results, *model.get_weights()]


with texts() as few:
    shared = trained()
with texts(shared=False) as many:
    expected = trained()
assert all(np.array_equal(value, other) for value, other in zip(shared, expected, strict=True))
assert len(few) < len(many), f"{len(few)} and {len(many)}"
if current().rank == 0:
    np.savez(out, *shared)
