"""`model.export(path, "onnx")`: what ONNX Runtime computes is what NumPy float64 does, whatever the number of rows."""

import json
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dptrain as dp
from dptrain import activations, layers, ops
from dptrain.data.preprocessing import Preprocessing
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.lowering import HostCall
from dptrain.program.program import trace
from dptrain.program.tensor import OPS
from dptrain.saving import onnx_file
from tests.programs.check import expected
from tests.programs.draw import program as drawn
from tests.programs.draw import seeds_of
from tests.sample import examples, sample
from tests.tolerances import assert_near
from tests.unit.layers.cases import ALL_CASES
from tests.unit.layers.cases import CASES as LAYER_CASES
from tests.unit.ops.cases import CASES as OP_CASES
from tests.unit.saving.loops import LOOPS, RECURRENT, Own, X, sequential

onnx = pytest.importorskip("onnx", reason="needs the extra 'onnx'")
onnxruntime = pytest.importorskip("onnxruntime", reason="needs onnxruntime")
ReferenceEvaluator = pytest.importorskip("onnx.reference").ReferenceEvaluator

RNG = np.random.default_rng(21)
# What only gradients and random layers are made of, and so no prediction: ONNX has no such operators.
WITHOUT = {"conv2d_kernel", "max_pool2d_input", "max_pool2d_take", "random_bits"}
# What is refused by name: the host's functions, and those of bits.
WITHOUT |= {name for name, op in OPS.items() if isinstance(op.lowering, HostCall)}
WITHOUT |= {"bit_and", "bit_invert", "bit_or", "bit_xor", "erfc_of", "greatest_divisor", "has_sign"}
WITHOUT |= {"left_shifted", "nextafter_along", "right_shifted"}
# And so what layers are made of these.
REFUSED_LAYERS = {"MelSpectrogram"}


class Session:
    """A file as ONNX Runtime executes it."""

    def __init__(self, content: bytes) -> None:
        onnx.checker.check_model(onnx.load_from_string(content), full_check=True)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        self.inputs = [tensor.name for tensor in self.session.get_inputs()]
        self.outputs = [tensor.name for tensor in self.session.get_outputs()]
        self._kinds = [tensor.type for tensor in self.session.get_inputs()]

    def __call__(self, *arrays: Any) -> list[np.ndarray]:
        """Return the outputs for arrays, which are cast to the types of the inputs."""
        types = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(bool)": np.bool_}
        cast = [
            np.asarray(array).astype(types.get(kind, kind[7:-1]))
            for array, kind in zip(arrays, self._kinds, strict=True)
        ]
        return self.session.run(None, dict(zip(self.inputs, cast, strict=True)))


def assert_same(model: dp.Model, arrays: list[np.ndarray], *, rows: tuple[int, ...] = (0, 1, 7)) -> None:
    """The exported model gives what the model gives in float64, for so many of the rows."""
    session = Session(onnx_file.encode(model))
    model.compile(dtype="float64", device="cpu", jit_compile=False)
    x = arrays[0] if len(arrays) == 1 else arrays
    full = model.predict(x, verbose=0)
    expected = full if isinstance(full, list) else list(full.values()) if isinstance(full, dict) else [full]
    for number in rows:
        actual = session(*(array[:number] for array in arrays))
        for ours, theirs in zip(expected, actual, strict=True):
            assert theirs.shape == (number, *ours.shape[1:])
            assert_near(theirs, ours[:number], "float32", scale=10)


# Ops


def test_every_op_is_written_or_known_not_to_be():
    assert {name for name, op in OPS.items() if op.onnx is None and op.onnx_rule is None} == WITHOUT
    assert not [name for name, op in OPS.items() if op.onnx is not None and op.onnx_rule is not None]


@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, id=f"{name}-{number}")
        for name, cases in OP_CASES.items()
        if name not in {*WITHOUT, "full"}  # of no input: the constant that it is
        for number, case in enumerate(cases)
    ],
)
def test_every_op_computes_what_numpy_does(name, case):
    rng = np.random.default_rng(7)
    arrays = [array.astype(np.float32) if (array := make(rng)).dtype.kind == "f" else array for make in case.inputs]
    counted = Dim.rows(10009)
    inputs = {
        f"x{n}": (tuple(counted if axis == case.rows[n] else length for axis, length in enumerate(x.shape)), x.dtype)
        for n, x in enumerate(arrays)
    }
    program = trace(lambda *xs: {"y": OPS[name](*xs, **case.attributes)}, inputs)
    session = Session(onnx_file.model_of(program, {n: n for n in inputs}, {"y": "y"}, name).SerializeToString())
    (actual,) = session(*arrays)
    expected = OPS[name](
        *(array.astype(np.float64) if array.dtype == np.float32 else array for array in arrays), **case.attributes
    )
    assert actual.shape == expected.shape
    assert_near(actual, expected.numpy(), "float32")


TYPES = ("uint8", "int8", "int32", "int64", "bool", "float32")
# With the types for which NumPy, or dptrain, has no such thing.
TYPED = {
    "add": (lambda x: x + x, ()),
    "maximum": (lambda x: ops.maximum(x, x * x), ()),
    "greater": (lambda x: x > x * x, ()),
    "where": (lambda x: ops.where(x == x * x, x, 0), ()),
    "sum": (lambda x: ops.sum(x, 1), ()),
    "max": (lambda x: ops.max(x, 1), ("bool",)),
    "argmax": (lambda x: ops.argmax(x, 1), ()),
    "floor": (lambda x: x // 3, ()),
    "rest": (lambda x: x % -3, ("uint8",)),
    "and": (lambda x: ops.logical_and(x, x != 1), ()),
    "isfinite": (ops.isfinite, ()),
    "sqrt": (lambda x: ops.sqrt(ops.cast(ops.abs(x), "float32")), ()),
    "one_hot": (lambda x: ops.one_hot(x, 3), ()),
    "concatenate": (lambda x: ops.concatenate([x, x * 0.5], 1), ()),
    "pad": (lambda x: ops.pad(x, [(0, 0), (1, 2)]), ()),
}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, dtype) for name, (_, without) in TYPED.items() for dtype in TYPES if dtype not in without],
)
def test_types_go_the_way_numpy_s_do(name, dtype):
    function, x = TYPED[name][0], np.array([[0, 1, 2], [5, 7, 3]]).astype(dtype)
    expected = function(ops.convert_to_tensor(x)).numpy()
    program = trace(lambda tensor: {"y": function(tensor)}, {"x": ((Dim.rows(10009), 3), dtype)})
    (actual,) = Session(onnx_file.model_of(program, {"x": "x"}, {"y": "y"}, "m").SerializeToString())(x)
    assert actual.dtype == program.outputs["y"].dtype
    assert_near(actual, expected.astype(np.float64), "float32")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:, 1:4:2],
        lambda x: x[:, -1],
        lambda x: x[0:1],
        lambda x: ops.reshape(x, (-1, 2, 2)),
        lambda x: ops.reshape(ops.transpose(x), (2, 2, -1)),
        lambda x: ops.concatenate([x, x * 2]),
        lambda x: x * ops.ones((x.shape[0], 1)) / x.shape[0],
        lambda x: x - ops.mean(x, 0),
        lambda x: ops.repeat(x, 2, 0),
        lambda x: ops.matmul(ops.transpose(x), x),
    ],
)
def test_rows_are_counted_when_the_graph_runs(function):
    program = trace(lambda x: {"y": function(x)}, {"x": ((Dim.rows(10009), 4), np.float32)})
    session = Session(onnx_file.model_of(program, {"x": "x"}, {"y": "y"}, "m").SerializeToString())
    for rows in (1, 2, 7):
        x = RNG.normal(size=(rows, 4))
        assert_near(session(x)[0], function(ops.convert_to_tensor(x)).numpy(), "float32", scale=10)


# Layers and models


# Each layer as it is used most, in every run.
@pytest.mark.parametrize(
    ("name", "number"), [pytest.param(*case, marks=[pytest.mark.long] if case[1] else []) for case in ALL_CASES]
)
def test_every_layer(name, number):
    case = LAYER_CASES[name][number]
    arrays = case.inputs(7)
    symbolic = [layers.Input(array.shape[1:], dtype="int64" if array.dtype.kind == "i" else None) for array in arrays]
    model = dp.Model(symbolic if len(symbolic) > 1 else symbolic[0], case.call(case.make(), symbolic), seed=3)
    if name in REFUSED_LAYERS:
        with pytest.raises(ConfigError, match=r"^not supported in ONNX: op '\w+' in '\w+'$"):
            onnx_file.encode(model)
        return
    assert_same(model, arrays)


@pytest.mark.parametrize("name", sorted(set(activations.BY_NAME) - {"threshold"}))
def test_every_activation(name):
    model = dp.Sequential([layers.Input((6,)), layers.Activation(name)])
    assert_same(model, [np.linspace(-8, 8, 42).reshape(7, 6)])


@st.composite
def stacks(draw):
    """A functional model of random layers on pictures, with branches."""
    x = image = layers.Input((7, 6, 2))
    for _ in range(draw(st.integers(1, 3))):
        padding, activation = draw(st.sampled_from(["valid", "same"])), draw(st.sampled_from(["relu", "silu", "tanh"]))
        size, stride = draw(st.integers(1, 2)), draw(st.integers(1, 2))
        kind = draw(st.sampled_from(["conv", "max", "mean", "up", "norm", "branch"]))
        if kind == "conv":
            x = layers.Conv2D(3, size, stride, padding, activation=activation)(x)
        elif kind == "max":
            x = layers.MaxPooling2D(size, stride, "same")(x)
        elif kind == "mean":
            x = layers.AveragePooling2D(size, stride, "same")(x)
        elif kind == "up":
            x = layers.Conv2DTranspose(2, size + 1, stride, padding)(x)
        elif kind == "norm":
            x = layers.BatchNormalization(beta_initializer="ones")(layers.LayerNormalization()(x))
        else:
            x = layers.Concatenate()([x, layers.Add()([x, ops.sigmoid(x)])])
    x = layers.Dropout(0.5)(layers.Dense(4, "gelu")(layers.Flatten()(x)))
    return dp.Model(image, {"classes": layers.Dense(3, "softmax")(x), "mean": ops.mean(x, 1, keepdims=True)}, seed=5)


@settings(max_examples=examples(20), deadline=None)
@given(stacks())
def test_random_models(model):
    assert_same(model, [np.random.default_rng(1).normal(size=(7, 7, 6, 2))], rows=(1, 7))


def test_inputs_and_outputs_have_the_model_s_names():
    a, b = layers.Input((3,), name="a"), layers.Input((2,), name="b", dtype="int32")
    merged = layers.Concatenate()([a, ops.cast(b, "float32")])
    several = dp.Model([a, b], [layers.Dense(2)(merged), a])
    session = Session(onnx_file.encode(several))
    assert (session.inputs, session.outputs) == (["a", "b"], ["output_0", "output_1"])
    named_session = Session(onnx_file.encode(dp.Model([a, b], {"a": a, "size": merged})))
    assert named_session.outputs == ["output_a", "size"]
    x, y = RNG.normal(size=(4, 3)), RNG.integers(0, 9, (4, 2))
    np.testing.assert_array_equal(
        named_session(x, y)[1], np.concatenate([x.astype(np.float32), y], 1, dtype=np.float32)
    )


def test_a_trained_model_from_its_file(tmp_path):
    x = RNG.random((40, 6, 6, 1)).astype(np.float32)
    model = dp.Sequential(
        [layers.Conv2D(3, 3, activation="relu", input_shape=(6, 6, 1)), layers.BatchNormalization(), layers.Flatten()]
    )
    model.add(layers.Dense(3, "softmax"))
    model.compile("adam", "sparse_categorical_crossentropy", device="cpu", jit_compile=False)
    model.fit(x, np.arange(40) % 3, epochs=2, verbose=0)
    model.export(tmp_path / "m.onnx", format="onnx")
    (actual,) = Session((tmp_path / "m.onnx").read_bytes())(x)
    assert_near(actual, model.predict(x, verbose=0), "float32")
    proto = onnx.load(tmp_path / "m.onnx")
    assert [(opset.domain, opset.version) for opset in proto.opset_import] == [("", 18)]
    assert {initializer.name for initializer in proto.graph.initializer if not initializer.name.startswith("/")} >= {
        "dense/bias"
    }
    assert onnx_file.encode(model) == (tmp_path / "m.onnx").read_bytes()


def test_preprocessing_is_metadata():
    model = dp.Sequential([layers.Input((4,)), layers.Dense(2, "softmax")])
    model.preprocessing = Preprocessing("multiclass", class_names=("cat", "dog"))
    proto = onnx.load_from_string(onnx_file.encode(model))
    ((key, value),) = [(prop.key, prop.value) for prop in proto.metadata_props]
    assert key == "preprocessing"
    assert Preprocessing.from_dict(json.loads(value)) == model.preprocessing


# Loops

# Those whose rows depend on each other; those that are refused.
OF_ALL_ROWS, REFUSED_LOOPS = (
    {"while", "unbounded", "of rows", "branches", "gradient of a branch"},
    {"random", "counted", "on the host"},
)


@pytest.mark.parametrize("name", [*(name for name in LOOPS if name not in REFUSED_LOOPS), *RECURRENT])
def test_loops_are_scans(name):
    """By ONNX Runtime and by ONNX's reference."""
    model = sequential([Own(LOOPS[name])] if name in LOOPS else RECURRENT[name]())
    x = X * (np.arange(X.shape[1]) % 3 > 0)[:, None] if name == "masks" else X
    content = onnx_file.encode(model)
    proto = onnx.load_from_string(content)
    kinds = {node.op_type for node in proto.graph.node}
    assert ("Scan" in kinds) == (name not in ("none", "single", "unbounded", "gradient of a branch"))
    assert ("If" in kinds) == ("branch" in name)
    assert ("Loop" in kinds) == (name == "unbounded")
    assert_same(model, [x], rows=(5,) if name in OF_ALL_ROWS else (0, 1, 5))
    (actual,) = ReferenceEvaluator(proto).run(None, {proto.graph.input[0].name: x})
    assert_near(actual, model.predict(x, verbose=0), "float32", scale=10)


def test_a_graph_is_as_long_for_many_steps_as_for_few():
    short, long = (onnx_file.encode(sequential([layers.LSTM(4)], steps)) for steps in (4, 2000))
    assert len(long) - len(short) < 100


@pytest.mark.parametrize("part", sample(range(10), 10))
def test_random_programs_with_loops(part):
    """But those with bfloat16, which ONNX Runtime does not take from NumPy, and what is refused."""
    for seed in seeds_of("loops", 100)[part::10]:
        case = drawn(seed)
        program = case.trace()
        if program.shape_specialised or case.steps != 1 or "bfloat16" in str(case):
            continue
        names = {name: f"input_{name}" for name in program.inputs}
        try:
            proto = onnx_file.model_of(program, names, {name: name for name in program.outputs}, "m")
        except ConfigError:
            continue
        session, judged = Session(proto.SerializeToString()), expected(case)
        values = {names[name]: value for name, value in case.values().items()}
        for name, array in zip(session.outputs, session(*(values[name] for name in session.inputs)), strict=True):
            right, tolerance = judged.values[name].astype(np.float64), judged.tolerances[name]
            assert array.shape == right.shape, f"{name} of {case}"
            with np.errstate(all="ignore"):
                off = np.abs(array.astype(np.float64) - right) > 100 * tolerance + 1e-4 * (1 + np.abs(right))
            assert not off.any(), f"{name} of {case}"


def test_what_onnx_cannot_say_in_a_loop_is_refused_by_name():
    def smoothed(layer: Any, x: Any, steps: Any) -> Any:
        return ops.sum(ops.map(ops.erfc, steps), 0)

    with pytest.raises(ConfigError, match=r"^not supported in ONNX: op 'erfc_of' in 'own"):
        onnx_file.encode(sequential([Own(smoothed)]))
    with pytest.raises(ConfigError, match=r"^not supported in ONNX: op 'inv\w*' in 'own"):
        onnx_file.encode(sequential([Own(LOOPS["on the host"])]))
    with pytest.raises(ConfigError, match=r"^not supported in ONNX: (op 'random_bits'|a prediction that changes)"):
        onnx_file.encode(sequential([Own(LOOPS["random"])]))


# What cannot be said


class Noisy(dp.Model):
    def __init__(self) -> None:
        super().__init__()
        self.dropout = layers.Dropout(0.5, name="noise")

    def call(self, inputs: Any) -> Any:
        return self.dropout(inputs, training=True)


class Counting(dp.Model):
    def __init__(self) -> None:
        super().__init__()
        self.count = self.add_weight((), "zeros", name="count", trainable=False)

    def call(self, inputs: Any) -> Any:
        self.count.assign(self.count + 1)
        return inputs + self.count


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Counting, r"not supported in ONNX: a prediction that changes variables \(count\)"),
        (Noisy, r"not supported in ONNX: (op 'random_bits'|a prediction that changes variables)"),
    ],
)
def test_what_onnx_cannot_say_is_refused_by_name(tmp_path, make, message):
    model = make()
    model.predict(np.ones((2, 3), np.float32), verbose=0)
    with pytest.raises(ConfigError, match=message):
        model.export(tmp_path / "m.onnx", "onnx")
    assert list(tmp_path.iterdir()) == []


def test_an_op_without_a_lowering_is_named_with_its_layer():
    class Own(layers.Layer):
        def call(self, x: Any) -> Any:
            y = ops.max_pool(x, 2)
            return OPS["max_pool2d_take"](x, y, x, window=(2, 2), strides=(2, 2), before=(0, 0))

    model = dp.Sequential([layers.Input((4, 4, 1)), Own(name="mine")])
    with pytest.raises(ConfigError, match=r"not supported in ONNX: op 'max_pool2d_take' in 'mine"):
        onnx_file.encode(model)


def test_padding_with_steps_is_refused():
    key = ((0, 10007, 1), (0, 5, 2))
    program = trace(
        lambda x: {"y": OPS["put"](x, key=((0, x.shape[0], 1), key[1]), shape=(x.shape[0], 5))},
        {"x": ((Dim.rows(10009), 3), np.float32)},
    )
    with pytest.raises(ConfigError, match="op 'put' with a step other than 1"):
        onnx_file.model_of(program, {"x": "x"}, {"y": "y"}, "m")


STACKS = {
    "convolutions": lambda: [
        layers.Conv2D(4, 3, strides=2, padding="same", activation="relu"),
        layers.DepthwiseConv2D(3, padding="same"),
        layers.MaxPooling2D(3, strides=2, padding="same"),
        layers.BatchNormalization(),
        layers.Conv2DTranspose(2, 3, strides=2, padding="same"),
    ],
    "means": lambda: [layers.Conv2D(4, 3, strides=2), layers.GlobalAveragePooling2D(), layers.Dense(2, "softmax")],
    "greatest": lambda: [layers.MaxPooling2D(), layers.Conv2D(4, 1), layers.GlobalMaxPooling2D()],
}


@pytest.mark.parametrize("name", STACKS)
def test_lengths_that_are_none_stay_open(name):
    model = dp.Sequential([layers.Input((None, None, 3), name="image"), *STACKS[name]()])
    session = Session(onnx_file.encode(model))
    assert session.session.get_inputs()[0].shape == ["rows", "image_1", "image_2", 3]
    for height, width in ((24, 33), (17, 12), (9, 10)):
        x = RNG.normal(size=(2, height, width, 3)).astype(np.float32)
        np.testing.assert_allclose(session(x)[0], model(x).numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("stack", "message"),
    [
        (lambda: [layers.Flatten()], "depends on lengths that are None: Reshape"),
        (lambda: [layers.MaxPooling2D(), layers.UpSampling2D()], "depends on lengths that are None: Reshape"),
        (lambda: [layers.GroupNormalization(3)], "depends on lengths that are None: Reshape"),
    ],
)
def test_what_depends_on_lengths_that_are_none_is_refused(stack, message):
    with pytest.raises(ConfigError, match=message):
        onnx_file.encode(dp.Sequential([layers.Input((None, None, 3)), *stack()]))


def test_a_model_that_does_not_take_all_lengths_is_refused():
    inputs = layers.Input((None, None, 3))
    half = layers.Conv2D(3, 3, strides=2, padding="same")(inputs)
    model = dp.Model(inputs, layers.Add()([inputs, layers.Conv2DTranspose(3, 3, strides=2, padding="same")(half)]))
    with pytest.raises(ConfigError, match="does not take all lengths that are None, such as 2521"):
        onnx_file.encode(model)


def test_without_onnx_one_line_says_what_to_install(tmp_path, monkeypatch):
    model = dp.Sequential([layers.Input((4,)), layers.Dense(1)])
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(ConfigError, match=r"ONNX files need onnx: pip install 'onnx>="):
        model.export(tmp_path / "m.onnx", "onnx")
    with pytest.raises(ConfigError, match="unknown format 'tf_saved_model'; known: generation, onnx, program"):
        model.export(tmp_path / "m", "tf_saved_model")
