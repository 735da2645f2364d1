"""Half precision on a GPU or the emulator: a CPU's numbers but for rounding, and packs with the bits of runs alone."""

import numpy as np
import pytest
from ml_dtypes import finfo

import dptrain as dp
from dptrain import layers, ops
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import trace
from dptrain.runtime.types import TYPES
from tests.sample import sample

RNG = np.random.default_rng(0)
X, Y = RNG.normal(size=(48, 6, 6, 2)).astype(np.float32), RNG.integers(0, 3, 48)


def build(learning_rate=0.01, policy="mixed_bfloat16", device="cuda"):
    model = dp.Sequential(
        [
            dp.Input((6, 6, 2)),
            layers.Conv2D(4, 3, activation="relu"),
            layers.BatchNormalization(),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(8, "gelu"),
            layers.Dropout(0.1),
            layers.Dense(3),
            layers.Activation("softmax", dtype="float32"),
        ],
    )
    options = {"share_gpu": True} if device == "cuda" else {"jit_compile": False}
    loss = "sparse_categorical_crossentropy"
    model.compile(dp.optimizers.Adam(learning_rate), loss, dtype=policy, device=device, **options)
    return model


@pytest.mark.parametrize("dtype", [name for name, known in TYPES.items() if known.is_narrow])
def test_what_is_stored_and_moved(cuda_backend, dtype):
    """Conversions of every kind of number, and views, rows, parts and joins of what is kept in two bytes or one."""
    table = dp.Variable(ops.cast(RNG.normal(size=(7, 3)), dtype))

    def step(x, rows):
        half = ops.cast(x, dtype)
        picked = ops.take(table, rows, axis=0)
        table.assign(table * 0.5)
        return {
            "half": half,
            "there and back": ops.cast(half, "float32"),
            "joined": ops.concatenate([half[:, ::-1], ops.transpose(ops.transpose(half))], 1),
            "taken": picked,
            "padded": ops.pad(picked, [(0, 0), (1, 2)]),
            "whole": ops.cast(half, "int32"),
            "flags": ops.cast(half, "bool"),
            "computed": ops.exp(half) + picked,
        }

    x = np.array([[0.1, -2.5, 1e-8], [65504, 65520, -1e38], [np.nan, np.inf, -0.0], [1 / 3, 257, 3e-40]], np.float32)
    values = {"x": x, "rows": np.array([0, 6, 3, 3])}
    program = trace(step, {"x": ((Dim.rows(4), 3), "float32"), "rows": ((Dim.rows(4),), "int64")})
    expected, updates = evaluate(program, values)
    executable = cuda_backend.executable(program, values)
    executable.run()
    for name, value in expected.items():
        actual = executable.outputs[name]
        assert actual.dtype == value.dtype
        if name == "whole":
            actual, value = actual[[0, 3]], value[[0, 3]]  # of what no integer is
        rtol = float(finfo(dtype).eps) if name == "computed" else 0
        np.testing.assert_allclose(
            actual.astype(np.float64), value.astype(np.float64), rtol=rtol, atol=1e-37, err_msg=name
        )
    np.testing.assert_array_equal(np.float32(table.numpy()), np.float32(updates[table]))


@pytest.mark.parametrize(
    ("dtype", "types"), sample([("bfloat16", 1), ("float16", 1), ("bfloat16", 2), ("float16", 2)], 3)
)
def test_products_on_tensor_cores_are_of_exact_factors(cuda_backend, dtype, types):
    """Whole numbers that float32 adds up exactly, up to the greatest that the type holds all of."""
    rng, greatest, length = np.random.default_rng(0), {"bfloat16": 256, "float16": 2048}[dtype], 40
    y_dtype = dtype if types == 1 else {"bfloat16": "float16", "float16": "bfloat16"}[dtype]
    greatest = greatest if types == 1 else 256
    x, y = (rng.integers(-greatest, greatest + 1, shape).astype(np.float32) for shape in ((length, 3), (3, length)))
    x[:, 2] = 0  # so that no sum is too long for float32's 24 bits

    def step(x, y):
        x, y = (
            ops.cast(ops.cast(tensor, tensor_dtype), "float32") for tensor, tensor_dtype in ((x, dtype), (y, y_dtype))
        )
        return {"product": x @ y, "transposed": ops.transpose(y) @ ops.transpose(x)}

    program = trace(step, {"x": ((Dim.rows(length), 3), "float32"), "y": ((3, length), "float32")})
    executable = cuda_backend.executable(program, {"x": x, "y": y})
    assert executable.source.count("product_half<" if types == 1 else "product_tf32<") == 2
    executable.run()
    np.testing.assert_array_equal(executable.outputs["product"], x @ y)
    np.testing.assert_array_equal(executable.outputs["transposed"], y.T @ x.T)


@pytest.mark.long
@pytest.mark.usefixtures("cuda_backend")
@pytest.mark.parametrize("policy", sample(["mixed_bfloat16", "mixed_float16", "bfloat16"], 3))
def test_a_training_is_that_of_a_cpu_but_for_rounding(policy):
    results = []
    for device in ("cuda", "cpu"):
        dp.utils.set_random_seed(3)
        model = build(policy=policy, device=device)
        history = model.fit(X, Y, batch_size=20, epochs=2, verbose=0)
        results.append((history.history["loss"], model.predict(X, verbose=0)))
    np.testing.assert_allclose(results[0][0], results[1][0], rtol=0.01)
    np.testing.assert_allclose(results[0][1], results[1][1], atol=0.05)


@pytest.mark.long
@pytest.mark.usefixtures("cuda_backend")
def test_a_pack_has_the_bits_of_runs_alone():
    losses = {}
    for packing in (1, False):
        result = dp.sweep(
            build,
            {"learning_rate": [0.01, 0.003]},
            seeds=[0, 1],
            x=X,
            y=Y,
            epochs=2,
            batch_size=20,
            packing=packing,
            runs_per_device=4,
            verbose=0,
        )
        losses[packing] = [(run["seed"], run["learning_rate"], run["metrics"]["loss"]) for run in result.runs]
    assert sorted(losses[1]) == sorted(losses[False])
    assert len({loss for _, _, loss in losses[1]}) == 4
