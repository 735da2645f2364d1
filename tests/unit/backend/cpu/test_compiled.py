"""Compiled programs compute what NumPy computes op by op; fused or not, they have the same bits."""

import re
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dptrain import ops
from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu import compiled
from dptrain.backend.cpu.codegen import generate
from dptrain.backend.cpu.compile import HEADERS
from dptrain.backend.cpu.compiled import FACTORS, IMPLEMENTATIONS, CompiledExecutable
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.errors import ConfigError, DataError, DeviceError
from dptrain.ops import random
from dptrain.ops.indexing import take_rows
from dptrain.program.codegen.fuse import fuse
from dptrain.program.codegen.kernels import ProductKernel
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory, evaluate
from dptrain.program.passes import with_half_factors
from dptrain.program.program import ROWS as ORDER
from dptrain.program.program import trace
from dptrain.program.sharding.placement import place
from dptrain.program.tensor import OPS, Variable
from tests.sample import examples, sample
from tests.unit.ops.test_every_op import ALL, program_of, step_of
from tests.unit.program.sharding.test_placement import DATA, cross_entropy, weights

pytestmark = pytest.mark.skipif(compiling.compiler() is None, reason="no C++ compiler")
CLOSE = {"rtol": 1e-11, "atol": 1e-12}


def executable_of(program, data, join):
    """Return a program compiled as users get it, or each op by itself and not optimized.

    The compiler's optimizations must change no bit either, and without them it takes a fifth of the time.
    """
    with pytest.MonkeyPatch.context() as patch:
        if not join:
            patch.setattr(compiling, "OPTIONS", ("-O0", *compiling.OPTIONS[1:]))
        return CompiledExecutable(program, HostMemory(), data, join=join)


def compare(program, steps=2, data=DATA, close=CLOSE):
    """Assert that fused and not fused give the same bits, and nearly those of `evaluate`; return what came out."""
    assert compiling.OPTIONS[0] == "-O3"
    before = {variable: variable.numpy() for variable in program.state}
    expected, state = [], dict(before)
    for _ in range(steps):
        outputs, updates = evaluate(program, data, state)
        state |= updates
        expected.append(outputs)
    ends = []
    for join in (True, False):
        for variable, value in before.items():
            variable.assign(value)
        executable, results = executable_of(program, data, join), []
        for expected_outputs in expected:
            executable.run()
            results.append(executable.outputs)
            derived = program.derived.outputs if program.derived is not None else {}
            assert executable.outputs.keys() == expected_outputs.keys() - derived.keys()
            for name, value in executable.outputs.items():
                assert (value.dtype, value.shape) == (expected_outputs[name].dtype, expected_outputs[name].shape)
                np.testing.assert_allclose(value, expected_outputs[name], **close, err_msg=name)
        for variable, value in state.items():
            np.testing.assert_allclose(variable.numpy(), value, **close, err_msg=variable.path)
        ends.append((results, {variable.path: variable.numpy() for variable in state}))
    fused, alone = ends
    for fused_values, other in ((fused[1], alone[1]), *zip(fused[0], alone[0], strict=True)):
        for name, value in fused_values.items():
            np.testing.assert_array_equal(np.isnan(value), np.isnan(other[name]))  # whose sign bit means nothing
            numbers = ~np.isnan(value)
            assert value[numbers].tobytes() == other[name][numbers].tobytes(), name
    return fused[0]


def together(cases):
    """Return one program of many, and the values of its inputs."""
    programs = [program_of(*case.values) for case in cases]
    specs, values, parts = {}, {}, []
    for number, (program, inputs) in enumerate(programs):
        names = {name: f"{number} {name}" for name in program.inputs}
        specs |= {names[name]: (tensor.shape, tensor.dtype) for name, tensor in program.inputs.items()}
        values |= {names[name]: inputs[name] for name in names}
        parts.append((number, list(names.values())))

    def step(*xs):
        tensors = dict(zip(specs, xs, strict=True))
        results = {}
        for number, names in parts:
            outputs = step_of(*cases[number].values)(*(tensors[name] for name in names))
            results |= {f"{cases[number].id} {name}": tensor for name, tensor in outputs.items()}
        return results

    return trace(step, specs), values


@pytest.mark.parametrize("part", sample(range(8), 8))
def test_every_op(part):
    """With its gradient; an op that has no code of its own is called."""
    program, values = together(ALL[part::8])
    compare(program, 1, values)


SPECIAL = [0.0, -0.0, 1.0, -1.5, 0.3, 2.0, 700.0, -700.0, 90.0, -90.0, 1e-30, np.inf, -np.inf, np.nan]
# Pairs whose quotient without its rest is rounded below a whole number.
SPECIAL += [-12.883614637495544, -0.8886376387184298, 38.14849, -1.3670421]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_special_numbers(dtype):
    """NaN, infinities and the ends of the range, as by NumPy."""
    unary = ["negative", "absolute", "sign", "exp", "log", "log1p", "sqrt", "square", "tanh", "sigmoid", "softplus"]
    unary += ["relu", "leaky_relu", "elu", "logical_not"]
    binary = ["add", "subtract", "multiply", "divide", "floor_divide", "power", "maximum", "minimum", "equal", "less"]
    values = np.array(SPECIAL, dtype)

    def step(a, b):
        a = a * 1  # so that relations of the same numbers are of tensors
        results = {name: OPS[name](a) for name in unary}
        results |= {name: OPS[name](a, b) for name in [*binary, "divide_no_nan", "not_equal", "greater_equal"]}
        return results | {"highest": ops.max(b, -1), "where": ops.argmax(b, -1)}

    program = trace(step, {"a": ((Dim.rows(len(values)), 1), dtype), "b": ((len(values),), dtype)})
    tolerance = {"rtol": 3e-7 if dtype == "float32" else 1e-15, "atol": 1e-37}
    compare(program, 1, {"a": values.reshape(-1, 1), "b": values}, tolerance)


def training():
    """Return a step on gathered rows, and what its inputs read."""
    variables = weights(w1=(7, 6), w2=(6, 3))

    def step(images, labels, rows):
        w1, w2 = variables.values()
        logits = ops.relu(ops.cast(take_rows(images, rows), "float64") @ w1 / 255) @ w2
        losses = cross_entropy(logits, take_rows(labels, rows))
        ops.mean(losses).backward()
        for variable in variables.values():
            variable.assign(variable - 0.1 * variable.value.grad)
        return {"losses": losses}

    rng = np.random.default_rng(5)
    data = {"images": rng.integers(0, 256, (40, 7)).astype(np.uint8), "labels": rng.integers(0, 3, 40)}
    return variables, step, data | {ORDER: rng.permutation(40)}


def specs(rows):
    return {"images": ((40, 7), "uint8"), "labels": ((40,), "int64"), ORDER: ((Dim.rows(rows),), "int64")}


def test_the_text_does_not_depend_on_the_batch():
    texts = [generate(fuse(place(trace(training()[1], specs(rows))))).source for rows in (8, 24)]
    assert texts[0] == texts[1]


def test_a_row_has_the_same_bits_in_any_batch():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(9, 37)).astype(np.float32)

    def rows(count):
        program = trace(
            lambda x: {"softmax": ops.softmax(ops.tanh(x)), "norm": ops.sum(ops.square(x), -1)},
            {"x": ((Dim.rows(count), 37), "float32")},
        )
        executable = CompiledExecutable(program, HostMemory(), {"x": x[:count]})
        executable.run()
        return executable.outputs

    whole_batch = rows(9)
    for count in (1, 4):
        for name, value in rows(count).items():
            assert value.tobytes() == whole_batch[name][:count].tobytes()


@pytest.mark.long
def test_threads_have_one_threads_bits():
    rows, features = 700, 300
    rng = np.random.default_rng(3)
    data = {"x": rng.normal(size=(900, features)).astype(np.float32), ORDER: rng.permutation(900)[:rows]}
    input_specs = {"x": ((900, features), "float32"), ORDER: ((Dim.rows(rows),), "int64")}
    start = rng.normal(0, 0.1, (features, features)).astype(np.float32)

    def trained(threads):
        w1, w2, b, slot, old = (
            Variable(initial) for initial in (start, start.T, start[0], np.zeros_like(start), start)
        )

        def step(x, rows):
            h = ops.relu(take_rows(x, rows) @ w1 + b)  # a gather; a loop over the rows that a product has made
            y = ops.tanh(h @ w2)
            shares = ops.softmax(y)  # one over rows, with their sums
            loss = ops.mean(ops.square(shares - y))  # one sum over all
            loss.backward()  # sums of blocks of the rows that a product has made, of the bias' gradient
            slot.assign(0.9 * slot + w1.value.grad)
            w1.assign(w1 - 0.1 * slot / (1 + ops.sqrt(ops.square(slot))))
            w2.assign(w2 - 0.1 * w2.value.grad)
            b.assign(b - 0.1 * b.value.grad)
            old.assign(0.5 * old)  # over all elements
            return {
                "loss": loss,
                "columns": ops.max(shares * y, axis=0),
                "rows": ops.sum(y, axis=1),
                "x": ops.sum(take_rows(x, rows), 0),
            }

        executable = CompiledExecutable(trace(step, input_specs), HostMemory(), data, threads=threads)
        executable.run([0, 0, 0])
        return [
            *executable.outputs.values(),
            *(variable.numpy() for variable in (w1, w2, b, old)),
        ], executable.code.source

    alone, source = trained(1)
    shared = re.findall(r"dp_rows\(c, numbers \+ \d+, kernel\d+, (\w+), ", source)
    assert str(features**2) in shared  # by elements
    for function_name in ("dp_summed", "dp_then", "dp_then_summed"):
        assert f"{function_name}<" in source or f"{function_name}(" in source
    for threads in (2, 3):
        for array, other in zip(trained(threads)[0], alone, strict=True):
            assert array.tobytes() == other.tobytes()


@pytest.mark.parametrize("rows", [1, 16, 17, 1025])
def test_sums_over_rows_are_those_of_blocks_wherever_they_are_computed(rows):
    """In a loop of their own over one axis, over two axes, or beside others."""

    def step(x):
        squares = ops.sum(ops.square(x), axis=1)
        results = {
            "columns": ops.sum(x, axis=0),
            "all": ops.sum(x),
            "total": ops.sum(squares),
            "of": ops.max(x, axis=0),
        }
        return results | {"lengths": ops.sum(ops.sqrt(squares)), "most": ops.max(squares)}

    program = trace(step, {"x": ((Dim.rows(rows), 40), "float32")})
    x = np.random.default_rng(rows).normal(size=(rows, 40)).astype(np.float32)
    assert "dp_summed(" in executable_of(program, {"x": x}, True).code.source
    compare(program, 1, {"x": x}, {"rtol": 1e-5, "atol": 1e-3})


@pytest.mark.long
def test_loops_over_what_a_convolution_makes_are_its_epilogue():
    """In each way in which convolutions are computed; their functions are shared by layers that are alike."""
    rows = 33
    rng = np.random.default_rng(6)
    data = {"x": rng.normal(size=(rows, 12, 20, 3)).astype(np.float32)}
    shapes = (5, 5, 3, 6), (3, 3, 6, 6), (3, 3, 6, 6), (1, 1, 6, 130), (1, 1, 130, 16), (3, 3, 16, 16)
    kernels = [Variable((rng.normal(size=shape) / 5).astype(np.float32)) for shape in shapes]
    biases = [Variable(rng.normal(size=shape[-1]).astype(np.float32)) for shape in shapes]

    def step(x):
        results, y = {}, x
        for number, (kernel, bias) in enumerate(zip(kernels, biases, strict=True)):
            y = ops.relu(ops.conv(y, kernel, padding="same") + bias)
            results[f"sums{number}"] = ops.sum(y, axis=(0, 1, 2))
        ops.mean(ops.square(y)).backward()
        return results | {f"gradient{number}": kernel.value.grad for number, kernel in enumerate(kernels)}

    program = trace(step, {"x": ((Dim.rows(rows), *data["x"].shape[1:]), "float32")})
    compare(program, 1, data, {"rtol": 1e-4, "atol": 1e-4})
    ends = []
    for threads in (1, 2, 3):
        executable = CompiledExecutable(program, HostMemory(), data, threads=threads)
        executable.run()
        ends.append({name: array.tobytes() for name, array in executable.outputs.items()})
    assert ends[0] == ends[1] == ends[2]
    source = executable.code.source
    for by in ("PRODUCT", "CHANNELS", "PIXELS"):
        assert re.search(rf"dp_then_summed<.*dp_conv2d<float>\(c, DP_{by}, ", source), by
    called = re.findall(r"kernel\d+(?=\(c, numbers)", source)
    assert len(set(called)) < len(called)


def bytes_of(plan, tensors):
    """Return the ranges of bytes that tensors have in the arena."""
    return [
        (plan.offsets[tensor], plan.offsets[tensor] + int(np.prod(tensor.shape)) * tensor.dtype.itemsize)
        for tensor in tensors
        if tensor in plan.offsets
    ]


def assert_epilogues_write_elsewhere(executable, rows):
    """Assert that no epilogue's result shares memory with what its product reads."""
    _, plan = compiled.planned(executable.fused, executable.code, rows)
    for product, loop in pairwise(executable.fused.kernels):
        if loop in executable.code.epilogues:
            read = {executable.fused.memory_of(view.root) for view in product.reads}
            for begin, end in bytes_of(plan, read):
                for first, last in bytes_of(plan, loop.tensors):
                    assert last <= begin or end <= first


# What is made of a product's factors before it, and of its rows behind it, in a loop that is its epilogue.
BEFORE = {"nothing": lambda x: x, "twice": lambda x: 2 * x, "powers": lambda x: ops.exp(x / 4)}
BEHIND = {
    "relu": lambda y: {"y": ops.relu(y)},
    "sums": lambda y: {"y": ops.tanh(y / 8), "sums": ops.sum(ops.tanh(y / 8), axis=0)},
    "shares": lambda y: {"y": ops.softmax(y / 8)},
}
LENGTHS = st.sampled_from([1, 15, 16, 17, 63, 64, 65, 128, 130])


@settings(max_examples=examples(24), deadline=None)
@given(rows=LENGTHS, terms=LENGTHS | st.just(2000), columns=LENGTHS, left=st.sampled_from(sorted(BEFORE)),
       right=st.sampled_from(sorted(BEFORE)), behind=st.sampled_from(sorted(BEHIND)))  # fmt: skip
@example(rows=128, terms=128, columns=128, left="nothing", right="twice", behind="sums")
@example(rows=130, terms=2000, columns=64, left="twice", right="nothing", behind="relu")
def test_an_epilogue_leaves_alone_what_its_product_reads(rows, terms, columns, left, right, behind):
    """Though nobody reads it later: other parts of the product do. The output could lie in the place of a factor."""
    rng = np.random.default_rng(5)
    data = {"x": rng.normal(size=(rows, terms)), "w": rng.normal(size=(terms, columns)) / np.sqrt(terms)}
    data = {name: array.astype(np.float32) for name, array in data.items()}

    def step(x, w):
        return BEHIND[behind](BEFORE[left](x) @ BEFORE[right](w))

    specs = {"x": ((Dim.rows(rows), terms), "float32"), "w": ((terms, columns), "float32")}
    program, results = trace(step, specs), []
    for threads in (1, 2):
        executable = CompiledExecutable(program, HostMemory(), data, threads=threads)
        assert_epilogues_write_elsewhere(executable, rows)
        assert executable.code.epilogues or columns < 64
        executable.run([0, 0])
        results.append(executable.outputs)
    exact = trace(step, {name: (shape, "float64") for name, (shape, _) in specs.items()})
    expected, _ = evaluate(exact, {name: array.astype(np.float64) for name, array in data.items()})
    for name, value in expected.items():
        assert results[0][name].tobytes() == results[1][name].tobytes()
        np.testing.assert_allclose(results[0][name], value, rtol=1e-4, atol=1e-4, err_msg=name)


def test_weights_are_written_over():
    variables, step, data = training()
    memory = HostMemory()
    executable = CompiledExecutable(trace(step, specs(8)), memory, data)
    executable.run()
    before = [memory.array(variable).ctypes.data for variable in variables.values()]
    assert all(address % 64 == 0 for address in before)
    places = dict(zip(executable.code.roots, executable.addresses, strict=True))
    assert [places[new] for new in executable.fused.updates.values()] == before


def test_programs_of_one_memory_share_an_arena():
    """What runs within another's run, or in another thread, has memory of its own; and a larger one moves all."""

    def program(rows):
        return trace(lambda x: {"y": ops.sum(ops.exp(x) @ ops.transpose(x), axis=0)}, {"x": ((rows, 3), np.float32)})

    rng = np.random.default_rng(0)
    memory, inputs = HostMemory(), {rows: rng.normal(size=(rows, 3)).astype(np.float32) for rows in (8, 40, 16)}
    executables = {rows: CompiledExecutable(program(rows), memory, {"x": x}) for rows, x in inputs.items()}
    expected = {rows: np.exp(x) @ x.T for rows, x in inputs.items()}

    def check(rows):
        executables[rows].run()
        np.testing.assert_allclose(executables[rows].outputs["y"], expected[rows].sum(axis=0), rtol=1e-5)

    for rows in (8, 40, 16, 8):
        check(rows)
    with memory.arena.lent(0) as arena:
        assert len(arena) == max(executable.nbytes for executable in executables.values()) > 0
        arena[...] = 255
        check(8)
        with ThreadPoolExecutor(1) as other:
            other.submit(check, 40).result()
        assert (arena == 255).all()
    check(8)


def test_refused():
    _, step, data = training()
    program = trace(step, specs(8))
    with pytest.raises(ConfigError, match="input 'labels' is missing"):
        CompiledExecutable(program, HostMemory(), {name: array for name, array in data.items() if name != "labels"})
    with pytest.raises(ConfigError, match=r"input 'images' has shape \(41, 7\): expected \(40, 7\)"):
        CompiledExecutable(program, HostMemory(), data | {"images": np.zeros((41, 7), np.float32)})
    with pytest.raises(ConfigError, match=r"input 'images' has shape \(39, 6\): expected \(40, 7\)"):
        CompiledExecutable(program, HostMemory(), data | {"images": np.zeros((39, 6), np.float32)})
    executable = CompiledExecutable(program, HostMemory(), data)
    with pytest.raises(DataError, match="a step begins at row 33 of 40, and needs 8"):
        executable.run([0, 33])
    wrong = CompiledExecutable(program, HostMemory(), data | {ORDER: data[ORDER] + 1})
    with pytest.raises(DataError, match="outside the table"):
        wrong.run([0, 8, 16, 24, 32])


def test_a_library_is_compiled_once(tmp_path, monkeypatch):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    compiling.library.cache_clear()
    source = 'extern "C" int answer() { return 41; }'
    assert compiling.library(source).answer() == 41
    (library,) = (tmp_path / "native").glob("*.so")
    modified = library.stat().st_mtime_ns
    compiling.library.cache_clear()
    assert compiling.library(source).answer() == 41
    assert library.stat().st_mtime_ns == modified
    with pytest.raises(DeviceError, match="fails on a generated program"):
        compiling.library("this is not C++")
    compiling.library.cache_clear()


def test_a_damaged_library_is_compiled_again(tmp_path, monkeypatch):
    """Loaded as it is, a library cut short ends the process with a bus error."""
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    source = 'extern "C" int damaged() { return 42; }'
    compiling.library(source)
    (path,) = (tmp_path / "native").glob("*.so")
    content = path.read_bytes()
    path.unlink()  # which is loaded
    path.write_bytes(content[:5000])
    compiling.library.cache_clear()
    assert compiling.library(source).damaged() == 42
    assert path.read_bytes() == content
    compiling.library.cache_clear()


def test_a_cache_that_may_not_be_executed(monkeypatch, tmp_path):
    monkeypatch.setenv("DPTRAIN_CACHE", str(tmp_path))
    monkeypatch.setattr(compiling, "_compiled", lambda *_: b"no library")
    compiling.library.cache_clear()
    with pytest.raises(DeviceError, match=r"a compiled program does not load: .*; set DPTRAIN_CACHE"):
        compiling.library("int x;")
    compiling.library.cache_clear()


def test_without_a_compiler(monkeypatch):
    monkeypatch.setattr(compiling, "compiler", lambda: None)
    compiling.library.cache_clear()
    with pytest.raises(DeviceError, match="no C\\+\\+ compiler"):
        compiling.library("int x;")


def test_no_steps_leave_no_outputs():
    executable = CompiledExecutable(
        trace(lambda x: {"twice": x * 2}, {"x": ((3,), "float32")}), HostMemory(), {"x": np.ones(3)}
    )
    executable.run([])
    assert not executable.outputs


def test_runs_with_other_seeds_share_one_text():
    """As those of a sweep, which would be compiled one by one."""
    texts, draws = set(), []
    for seed in (3, 2**63 - 1):
        generators = [random.SeedGenerator(seed, number=number) for number in range(2)]

        def step(x, generators=generators):
            return {
                f"y{n}": random.uniform((x.shape[0], 4), seed=generator) + x for n, generator in enumerate(generators)
            }

        program, data = trace(step, {"x": ((Dim.rows(6), 4), "float32")}), {"x": np.zeros((6, 4), np.float32)}
        expected, _ = evaluate(program, data)  # before the draws are counted
        executable = CompiledExecutable(program, HostMemory(), data)
        executable.run()
        for name, value in expected.items():
            np.testing.assert_array_equal(executable.outputs[name], value)
        texts.add(executable.code.source)
        draws += [array.tobytes() for array in expected.values()]
    assert len(texts) == 1
    assert len(set(draws)) == 4


@pytest.mark.long
@pytest.mark.parametrize("dtype", sample(["bfloat16", "float16"], 2))
def test_products_read_half_precision_without_copies(monkeypatch, dtype):
    """They take less memory, and have the bits of products of float32 copies."""
    monkeypatch.setattr(compiling, "has_tiles", lambda: False)  # whose products have other bits
    monkeypatch.setattr(compiled, "products", compiling.products.__wrapped__)
    rng = np.random.default_rng(0)
    x, w1, w2 = (rng.normal(size=shape).astype(np.float32) for shape in ((40, 90), (90, 70), (70, 50)))
    weights = [Variable(w1), Variable(w2)]

    def step(x):
        y = ops.cast(x, dtype)
        for weight in weights:
            y = ops.relu(y @ ops.cast(weight, dtype))
        ops.mean(ops.square(y)).backward()
        return {"y": y, "first": weights[0].value.grad, "second": weights[1].value.grad}

    program, results = trace(step, {"x": ((Dim.rows(40), 90), "float32")}), []
    for change in (with_half_factors, lambda tensor: tensor):
        monkeypatch.setattr("dptrain.program.codegen.fuse.with_half_factors", change)
        monkeypatch.setattr(compiled, "_LOWERED", type(compiled._LOWERED)())
        program.lowered.clear()
        executable = CompiledExecutable(program, HostMemory(), {"x": x})
        executable.run()
        factors = {
            view.root.dtype
            for kernel in executable.fused.kernels
            if isinstance(kernel, ProductKernel)
            for view in kernel.reads
        }
        outputs = {name: array.tobytes() for name, array in executable.outputs.items()}
        results.append((outputs, factors, executable.nbytes))
    halves, copies = results
    assert halves[0] == copies[0]
    assert [halves[1], copies[1]] == [{np.dtype(dtype)}, {np.dtype("float32")}]
    assert halves[2] < copies[2]


@pytest.mark.parametrize(("name", "expected"), [("Implementation", IMPLEMENTATIONS), ("Factor", FACTORS)])
def test_the_enums_of_shared_functions_are_those_of_the_headers(name, expected):
    text = "".join((kernels_dir() / header).read_text() for header in HEADERS)
    (members,) = re.findall(rf"enum dp_{name} {{([^}}]*)}}", text)
    assert members.replace(" ", "").split(",") == [f"DP_{word.upper()}" for word in (*expected, f"{name}s")]
