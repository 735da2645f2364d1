"""Convolutions by cuDNN, and who computes what where that is measured: with the libraries, or stand-ins for them."""

import importlib.util
import json
import sys

import numpy as np
import pytest

from dptrain import ops
from dptrain.comm.solo import SoloCommunicator
from dptrain.errors import ConfigError
from dptrain.program.dims import Dim
from dptrain.program.execute import evaluate
from dptrain.program.program import ROWS, trace
from dptrain.program.tensor import Variable
from dptrain.runtime.storage import measurements
from tests.conftest import ROOT
from tests.ops.test_convolutions_on_cuda import SHAPES, WIDE, check_halves, cnn, program_of
from tests.ops.test_programs_on_cuda import check_state
from tests.sample import sample
from tests.tolerances import assert_near, rounded

# Window with strides of which cuDNN's stand-in has no plan.
REFUSED = {"large strides": ((11, 11), (2, 2, 4, 4), (5, 5), (1, 1), (0, 0), (2, 2))}
# Of these the images' gradient is ours: windows do not see an image to its edge.
UNSEEN = 1
IS_STANDIN = importlib.util.find_spec("cudnn") is None


@pytest.fixture
def opened(cuda_backend, monkeypatch, tmp_path):
    """Return a function that opens a backend; nothing has been measured at first."""
    from dptrain.backend.cuda.libraries import choices

    monkeypatch.setattr(measurements, "cache_dir", lambda: tmp_path)
    monkeypatch.setattr(choices, "_said", set())
    if IS_STANDIN:
        monkeypatch.syspath_prepend(str(ROOT / "tests" / "standins"))
        sys.modules.pop("cudnn", None)
    backends = []

    def open_backend(**options):
        backends.append(type(cuda_backend)(**options))
        return backends[-1]

    yield open_backend
    for backend in backends:
        backend.close()
    if IS_STANDIN and sys.modules.get("cudnn") is not None:
        assert not sys.modules["cudnn"].live, "handles are given back"


def notes_of_plans():
    """Return the notes of the plans that cuDNN's stand-in has executed since the last call."""
    executed = sys.modules["cudnn"].executed if IS_STANDIN else []
    names = {name for _, notes in executed for name in notes}
    executed.clear()
    return names


@pytest.mark.parametrize("precision", sample(["tf32", "float32"], 2))
def test_library_convolutions(opened, precision):
    backend, rng = opened(precision=precision, conv="cudnn"), np.random.default_rng(0)
    chosen = SHAPES if precision == "float32" else {name: SHAPES[name] for name in ("uneven", "not to the edge")}
    program, specs = program_of(chosen | REFUSED, 3)
    shapes = {name: shape if name.endswith("kernel") else (3, *shape[1:]) for name, (shape, _) in specs.items()}
    values = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    executable = backend.executable(program, values, rows=3)
    ours = {"float32": "product<", "tf32": "product_tf32<"}[precision]
    if IS_STANDIN:
        assert executable.source.count(ours) == UNSEEN + 3 * len(REFUSED)
    executable.run()
    exact = {name: rounded(value, precision).astype(np.float64) for name, value in values.items()}
    for name, value in evaluate(program, exact, rows=3)[0].items():
        assert_near(executable.outputs[name], value, precision, 64)
    assert notes_of_plans() <= ({"TENSOR_CORE"} if precision == "tf32" else set())
    none = {name: value if name.endswith("kernel") else value[:0] for name, value in values.items()}
    executable = backend.executable(program, none, rows=0)
    executable.run()
    for name, value in evaluate(program, none, rows=0)[0].items():
        np.testing.assert_array_equal(executable.outputs[name], value)
    assert not notes_of_plans()


@pytest.mark.parametrize("dtype", sample(["bfloat16", "float16"], 2))
def test_library_convolutions_of_halves(opened, dtype):
    source = check_halves(opened(conv="cudnn"), WIDE, dtype, 2)
    if IS_STANDIN:
        assert "product_half<" not in source
        assert notes_of_plans() == {"TENSOR_CORE"}


def trained(backend, *, strides, rows=6):
    """Return an executable that has made steps of a small network, after comparing its state with NumPy's."""
    rng = np.random.default_rng(0)
    program, data = cnn(rng, strides=strides, rows=rows)
    order, state = rng.permutation(40)[: 6 * rows], {}
    for start in range(0, 6 * rows, rows):
        state |= evaluate(program, data | {ROWS: order[start : start + rows]}, state)[1]
    executable = backend.executable(program, data | {ROWS: order})
    executable.run(range(0, 6 * rows, rows))
    check_state(state)
    return program, executable


@pytest.mark.parametrize("strides", sample([1, 2], 2))
def test_library_convolutions_in_training(opened, strides):
    backend = opened(conv="cudnn")
    _, executable = trained(backend, strides=strides)
    assert executable._table.graphs, "convolutions are parts of graphs"
    assert executable.pack_key is None, "what a library computes is never part of a pack"
    assert executable.source.count("product<") == 3, "products of matrices stay ours"
    assert "convolutions by cudnn" in backend.numerics


def settled(backend, program, rows=6):
    backend.settle([(program, rows)], SoloCommunicator())
    return dict(backend.choices.chosen)


@pytest.mark.long
def test_library_or_ours_is_measured_once(opened, monkeypatch, capfd, tmp_path):
    """By a table of its own each, what is chosen decides who computes, and is kept for the machine."""
    auto = {"gemm": "auto", "conv": "auto"}
    program, _ = cnn(np.random.default_rng(0))
    first = opened(**auto)
    assert first.measures
    before = first.numerics
    chosen = settled(first, program)
    # The images' gradient of the first convolution nobody needs.
    assert [sum(name.startswith(kind) for name in chosen) for kind in ("conv", "gemm")] == [5, 3]
    assert first.numerics != before, "ranks compare what was chosen"
    errors = capfd.readouterr().err
    assert "--conv auto: cudnn" in errors
    assert "5 measured now" in errors
    (path,) = (tmp_path / "products").iterdir()
    table = json.loads(path.read_text())
    assert table.keys() == chosen.keys()
    for name, seconds in table.items():
        library = {"conv": "cudnn", "gemm": "cublaslt"}[name[:4]]
        assert seconds.keys() == {"dptrain", library}
        # As if a library were far faster, or far slower, from now on.
        table[name] = {"dptrain": 1.0, library: 2.0 if name.startswith("gemm") else 0.1}
    path.write_text(json.dumps(table))
    monkeypatch.setattr(type(first.choices), "_seconds", lambda *_: pytest.fail("measured once more"))
    second = opened(**auto)
    chosen = settled(second, program)
    assert {name[:4]: by for name, by in chosen.items()} == {"conv": "cudnn", "gemm": "dptrain"}
    assert "5 of 5, measured before" in capfd.readouterr().err
    _, executable = trained(second, strides=1)
    assert executable.source.count("product<") == 3
    assert settled(second, program) == chosen
    # A training that goes on elsewhere does what it did.
    third = opened(**auto)
    third.choose(json.loads(json.dumps(second.chosen)))
    assert third.numerics == second.numerics
    assert settled(third, program) == chosen
    with pytest.raises(ConfigError, match="the checkpoint's training used cublaslt 7, but found cudnn"):
        third.choose({"libraries": ["cublaslt 7"], "chosen": chosen})
    with pytest.raises(
        ConfigError, match=r"the checkpoint was trained with kernels of sh, which this version of dptrain does not have"
    ):
        third.choose({"libraries": second.chosen["libraries"], "chosen": {"conv": "sh"}})


@pytest.mark.skipif(not IS_STANDIN, reason="cuDNN is right")
def test_a_library_whose_numbers_are_wrong_is_never_chosen(opened, monkeypatch):
    backend = opened(conv="auto")
    program, _ = cnn(np.random.default_rng(0))
    cudnn, computed = sys.modules["cudnn"], sys.modules["cudnn"]._computed
    monkeypatch.setattr(cudnn, "_computed", lambda node, arrays: computed(node, arrays) + (node.way == "wgrad"))
    monkeypatch.setattr(type(backend.choices), "_faster", lambda _, problem, seconds: sorted(seconds)[0])
    chosen = settled(backend, program)
    assert {name.split()[3]: by for name, by in chosen.items()} == {"0": "cudnn", "1": "cudnn", "2": "dptrain"}


@pytest.mark.skipif(not IS_STANDIN, reason="cuDNN may have a plan for it")
def test_what_no_library_takes_is_said_once(opened, capfd):
    backend = opened(conv="cudnn")
    program = program_of(REFUSED, 3)[0]
    for _ in range(2):
        assert settled(backend, program, 3) == {}
    errors = capfd.readouterr().err
    assert errors.count("dptrain: --conv cudnn: not supported for conv float32 float32 0 3 4 4 11 11 2 2 2 2 5 5") == 1
    assert "and 2 more; dptrain's kernels compute it" in errors


def test_auto_without_libraries_is_ours(opened, cuda_backend, monkeypatch):
    monkeypatch.setitem(sys.modules, "cudnn", None)
    backend = opened(conv="auto")
    assert not backend.measures
    assert backend.numerics == cuda_backend.numerics
    assert (
        "--conv auto: no library is available (conv = 'cudnn': nvidia-cudnn-frontend is not installed"
        in backend.description
    )
    with pytest.raises(ConfigError, match=r"nvidia-cudnn-frontend is not installed .*; pip install"):
        opened(conv="cudnn")


def test_library_convolutions_in_a_loop(opened):
    """Which are given other addresses at each step."""
    rng = np.random.default_rng(0)
    kernels = [Variable(0.3 * rng.normal(size=(3, 3, 4, 4)).astype(np.float32), name) for name in ("k", "u")]

    def step(x):
        for kernel in kernels:
            kernel._gradient = None

        def cell(h, xt):
            h = ops.tanh(ops.conv(xt, kernels[0], padding="same") + ops.conv(h, kernels[1], padding="same"))
            return h, h

        h, ys = ops.scan(cell, x[0], x)
        loss = ops.mean(h * h) + ops.mean(ys)
        loss.backward()
        return {"h": h, **{kernel.name: kernel._gradient for kernel in kernels}}

    program = trace(step, {"x": ((3, Dim.rows(2), 6, 6, 4), "float32")})
    values = {"x": rng.normal(size=(3, 2, 6, 6, 4)).astype(np.float32)}
    executable = opened(conv="cudnn").executable(program, values)
    executable.run([0, 0])
    assert not IS_STANDIN or len(sys.modules["cudnn"].executed) >= 2 * 3 * 2
    notes_of_plans()
    for name, value in evaluate(program, values)[0].items():
        np.testing.assert_allclose(executable.outputs[name], value, rtol=2e-4, atol=2e-5, err_msg=name)
