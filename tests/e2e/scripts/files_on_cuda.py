"""Train on the GPU, save, load there and on the CPU. Arguments: folder."""

import sys
from pathlib import Path

import numpy as np

import dptrain as dp

folder = Path(sys.argv[1])
rng = np.random.default_rng(4)
x, y = rng.random((24, 5)).astype(np.float32), rng.integers(0, 3, 24)


def train(model: dp.Sequential) -> list[float]:
    return model.fit(x, y, batch_size=8, epochs=2, verbose=0, shuffle=False).history["loss"]


stack = [dp.layers.Dense(6, "tanh", input_shape=(5,)), dp.layers.Dropout(0.2), dp.layers.Dense(3, "softmax")]
model = dp.Sequential(stack, seed=3)
model.compile(dp.optimizers.Adam(0.01), "sparse_categorical_crossentropy", device="cuda")
train(model)
model.save(folder / "saved.keras")
model.save_weights(folder / "saved.safetensors")
on_gpu = dp.models.load_model(folder / "saved.keras", device="cuda")
on_cpu = dp.models.load_model(folder / "saved.keras", device="cpu")
expected = train(model)
assert train(on_gpu) == expected
np.testing.assert_allclose(train(on_cpu), expected, rtol=1e-5)
np.testing.assert_array_equal(on_gpu.predict(x, verbose=0), model.predict(x, verbose=0))
on_gpu.load_weights(folder / "saved.safetensors")
saved = dp.models.load_model(folder / "saved.keras", device="cuda")
np.testing.assert_array_equal(on_gpu.predict(x, verbose=0), saved.predict(x, verbose=0))
print("same")
