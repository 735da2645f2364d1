"""Programs that were wrong once, as `shrink.py` left them: executed in every run of the tests.

Paste what `benchmarks/fuzz_programs.py` prints, with a name that says what was wrong.
"""

from tests.programs.case import Case

CORPUS = {
    "a sum over the ranks that comes out": Case(
        lengths={"n": 3, "a": 2},
        leaves={"x0": "input n a float32 normal", "w1": "variable a float32 normal"},
        lines=("t0 = ops.sum(x0 * x0, 0)", "t1 = ops.mean(x0) * x0"),
        outputs=("t0", "t1"),
        updates={"w1": "ops.sum(x0, 0)"},
        shards=(1, 2),
    ),
    "a reshape of a number that stands at every place": Case(
        lengths={"n": 2, "a": 2},
        leaves={"x0": "input n a float32 normal"},
        lines=("t0 = ops.reshape(x0, (-1,))", "t1 = gradients(ops.sum(t0), [x0])[0]"),
        outputs=("t1",),
    ),
    "a product with a number that stands at every place": Case(
        lengths={"n": 3, "a": 2},
        leaves={"x0": "input n a float64 normal", "w1": "variable a a float64 normal"},
        lines=("t0 = x0 @ w1", "t1 = gradients(ops.sum(t0), [w1])[0]"),
        outputs=("t1",),
    ),
    "the gradient of a slice backwards on ranks": Case(
        lengths={"n": 5, "a": 4},
        leaves={"x0": "input n a float32 normal"},
        lines=("t0 = x0[:, ::-1]", "t1 = gradients(ops.sum(t0 * t0), [x0])[0]"),
        outputs=("t1",),
        shards=(2, 0, 3),
    ),
    "no steps": Case(
        lengths={"n": 2, "a": 3},
        leaves={"x0": "input n a float32 normal", "w1": "variable a float32 normal"},
        lines=("t0 = x0 * w1",),
        outputs=("t0",),
        updates={"w1": "w1 * 0.5"},
        steps=0,
        shards=(1, 1),
    ),
    "a reshape outside of a transpose": Case(
        lengths={"n": 3, "a": 4, "b": 2, "c": 5},
        leaves={"x0": "input n a b float32 normal", "w1": "variable c 8 float32 normal"},
        lines=(
            "t0 = ops.transpose(x0, (0, 2, 1))",
            "t1 = ops.reshape(t0, (x0.shape[0], -1)) @ ops.transpose(w1, (1, 0))",
        ),
        outputs=("t1",),
    ),
    "the sign of a fraction that was cut off": Case(
        lengths={"n": 40},
        leaves={"x0": "input n 3 float32 normal"},
        lines=(
            "t0 = ops.cast(x0 * 0.25, 'int64')",
            "t1 = ops.cast(t0, 'float32')",
            "t2 = 1 / t1",
            "t3 = 1.0 / (t0 * 2.5)",
        ),
        outputs=("t2", "t3"),
    ),
    "the place of the greatest of sums in their own loop": Case(
        lengths={"n": 3, "a": 4},
        leaves={"x0": "input n a float32 normal"},
        lines=("t0 = ops.sum(x0 * x0, 1)", "t1 = ops.argmax(t0, 0)"),
        outputs=("t0", "t1"),
    ),
    "the error function of nothing": Case(
        lengths={"n": 3},
        leaves={"x0": "input n float32 normal"},
        lines=("t0 = ops.erf(x0 * 0.0)", "t1 = 1 / t0"),
        outputs=("t0", "t1"),
    ),
    "extremes of narrow types": Case(
        lengths={"n": 40, "a": 3},
        leaves={"x0": "input n a float32 normal"},
        lines=(
            "t0 = ops.cast(x0 * 30, 'int8')",
            "t1 = ops.argmax(t0, -1)",
            "t2 = ops.max(t0, -1)",
            "t3 = ops.argmax(x0 > 0, -1)",
            "t4 = ops.max(t0)",
            "t5 = ops.argmax(ops.cast(t0, 'int16'), 0)",
        ),
        outputs=("t1", "t2", "t3", "t4", "t5"),
    ),
    "a number beside narrow whole ones": Case(
        lengths={"n": 3},
        leaves={"x0": "input n float32 whole"},
        lines=("t0 = ops.cast(ops.absolute(x0) * 1.75, 'uint8')", "t1 = ops.floor_divide(t0, 2) + t0"),
        outputs=("t1",),
    ),
    "the error function in another type": Case(
        lengths={"n": 2, "a": 8, "b": 5},
        leaves={"x0": "input n a b float32 normal"},
        lines=("t0 = ops.cast(ops.erf(x0), 'float64')",),
        outputs=("t0",),
        seed=501231,
    ),
    "numbers next to 0 over themselves": Case(  # 1 where a device keeps denormal numbers, else 0
        lengths={"n": 52, "a": 8},
        leaves={"x0": "input n a float32 normal"},
        lines=("t0 = ops.softmax(ops.transpose(x0, (1, 0)) @ x0)", "t1 = ops.divide_no_nan(t0, t0)"),
        outputs=("t1",),
        seed=600310,
    ),
    "a gradient beside whole numbers": Case(
        lengths={"n": 13, "a": 8},
        leaves={"x0": "input n a float32 normal"},
        lines=(
            "t0 = ops.cast(ops.absolute(ops.where(ops.absolute(x0) < 100, x0 * 1.75, 2.5)), 'uint8')",
            "t2 = t0 + x0",
            "d7_x0 = gradients(ops.sum(t2 * t2), [x0])[0]",
        ),
        outputs=("d7_x0",),
        seed=540021,
    ),
    "a factor that no float32 holds": Case(
        lengths={"n": 1, "a": 6, "b": 1},
        leaves={"x0": "input n a b float32 normal", "w2": "variable b b float64 normal"},
        lines=("t0 = ops.leaky_relu(x0, 0.3)", "t1 = t0 @ w2"),
        outputs=("t1",),
        seed=560019,
    ),
    "rows of a table that is one row, spread": Case(
        lengths={"n": 0, "b": 2},
        leaves={"w1": "variable b float32 whole"},
        lines=(
            "t0 = ops.mean(w1, (0,), keepdims=True)",
            "d4_w1 = gradients(ops.sum(t0 * t0), [w1])[0]",
            "t7 = d4_w1[::-1]",
        ),
        outputs=(),
        updates={"w1": "w1 * 0.5 + ops.tanh(t7)"},
        seed=7001127,
    ),
    "rounded and widened at once": Case(  # which GCC left out for _Float16 on a CPU that computes in it
        lengths={"n": 1, "a": 4},
        leaves={"x1": "input n a bool any"},
        lines=("t8 = ops.cast(x1, 'float16')", "t9 = ops.cast(ops.softmax(t8, -1), 'float32')"),
        outputs=("t9",),
        seed=7001028,
    ),
    "sums halfway between two halves": Case(
        lengths={"n": 24, "a": 1, "b": 16, "d": 63},
        leaves={
            "x0": "input n a float32 normal",
            "w1": "variable a b float32 normal",
            "w3": "variable b d float16 normal",
        },
        lines=("t2 = x0 @ w1", "t4 = ops.cast(t2, 'float16')", "t15 = t4 @ w3"),
        outputs=("t15",),
        seed=8000481,
    ),
    "a sum that cancels to nothing": Case(
        lengths={"n": 16, "a": 8, "b": 7},
        leaves={"x0": "input n a b float32 special"},
        lines=(
            "t0 = ops.sum(x0, (0,), keepdims=True)",
            "t1 = ops.cast(ops.clip(ops.where(ops.absolute(t0) < 100, t0 * 1.75, 2.5), -90, 90), 'int8')",
        ),
        outputs=("t1",),
        shards=(11, 5),
        seed=8002531,
    ),
    "a sum over ranks as whole numbers and flags": Case(
        lengths={"n": 4, "a": 3},
        leaves={"x0": "input n a float64 normal"},
        lines=("t0 = ops.mean(x0, 0)", "t1 = ops.cast(t0 * 4, 'int32')", "t2 = ops.cast(t0 * 0.25, 'bool')"),
        outputs=("t1", "t2"),
        shards=(1, 3),
    ),
}
