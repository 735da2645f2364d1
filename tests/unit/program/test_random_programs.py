"""Random programs by NumPy and C++, alone and on ranks; see `tests/programs`."""

import dataclasses
import os

import numpy as np
import pytest

from dptrain.backend.cpu import codegen
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cuda import generate, products
from dptrain.backend.cuda.frames import columns, elements
from tests.programs.case import Case
from tests.programs.check import by_numpy, expected, run_alone, wrong_beside_unrolled, wrong_on_cpu
from tests.programs.corpus import CORPUS
from tests.programs.draw import THRESHOLDS, program, seeds_of
from tests.programs.features import TILED, WANTED, features
from tests.programs.meshes import wrong_on_mesh
from tests.programs.same import same_for_rows
from tests.programs.shrink import shrunk
from tests.sample import sample

needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C++ compiler")
# Programs in each of twelve tests; more of them by DPTRAIN_PROGRAMS.
EACH = int(os.environ.get("DPTRAIN_PROGRAMS", "4"))
PARTS = 12


@needs_compiler
@pytest.mark.parametrize("part", sample(range(PARTS), 12))
def test_random_programs(part):
    for seed in range(part * EACH, (part + 1) * EACH):
        case = program(seed)
        assert not (fault := wrong_on_cpu(case, thorough=seed % 4 == 0)), f"{fault}\n{case}"


@pytest.mark.parametrize("part", sample(range(PARTS), 3))
def test_a_program_is_for_any_number_of_rows_unless_it_says_otherwise(part):
    for seed in range(part * EACH, (part + 1) * EACH):
        case = program(seed)
        traced = case.trace()
        for rows in (1, case.rows + 1, 2 * case.rows + 3):
            other = dataclasses.replace(case, lengths=case.lengths | {"n": rows}, steps=min(case.steps, 1))
            assert traced.shape_specialised or same_for_rows(traced, other.trace()), case


@needs_compiler
@pytest.mark.parametrize("name", sample(CORPUS, 8))
def test_corpus(name):
    case = CORPUS[name]
    assert not (wrong_on_mesh(case, compiles=True) if case.mesh else wrong_on_cpu(case, thorough=False))


@needs_compiler
def test_powers_have_the_same_bits_however_much_is_optimized():
    assert not wrong_on_cpu(CORPUS["powers that a compiler makes a product or a quotient of"], thorough=True)


@pytest.mark.parametrize("part", sample(range(PARTS), 6))
def test_random_programs_on_meshes(part):
    """Op by op, and in the kernels and the memory of compiled code."""
    for seed in range(part * EACH // 4, (part + 1) * EACH // 4):
        case = program(seed, "mesh")
        assert not (fault := wrong_on_mesh(case, compiles=False)), f"{fault}\n{case}"


@pytest.mark.parametrize("part", sample(range(PARTS), 6))
def test_random_loops_and_their_gradients_beside_unrolled_ones(part):
    for seed in seeds_of("loops", PARTS * EACH)[part::PARTS]:
        case = program(seed)
        assert not (fault := wrong_beside_unrolled(case)), f"{fault}\n{case}"


@pytest.mark.long
def test_all_that_must_be_is_drawn():
    """Within so many seeds, on either device."""
    for device, others in (("cpu", {"alone, pack, alone"}), ("cuda", TILED)):
        missing = set(WANTED) - others
        for seed in range(1000):
            missing -= features(program(seed, device))
            if not missing:
                break
        assert not missing, device


@pytest.mark.long
def test_lengths_are_drawn_on_both_sides_of_what_generators_decide_by():
    chosen = {codegen._BLOCK, codegen._WIDE, elements._MAPPED, elements._SUMMED, generate.LONG_ROW}
    chosen |= {columns._THREAD_ROWS, products._LEAST_SPLIT, products._LONG_SLICE, *products.TILES}
    assert chosen <= set(THRESHOLDS)
    missing = {length + offset for length in chosen - {4096} for offset in (-1, 1)}
    for seed in range(3000):
        missing -= set(program(seed).lengths.values())
        if not missing:
            break
    assert not missing


def test_a_seed_has_one_program():
    assert [str(program(seed)) for seed in range(20)] == [str(program(seed)) for seed in range(20)]


def test_the_text_of_a_case_makes_it():
    for seed in range(20):
        case = program(seed)
        assert eval(str(case), {"Case": Case}) == case


SMALL = Case(
    lengths={"n": 5, "a": 4, "b": 9},
    leaves={"x": "input n a float32 normal", "w": "variable a b float32 normal", "v": "variable float32 normal"},
    lines=("t0 = ops.tanh(x)", "t1 = t0 @ w", "t2 = t1 * v", "t3 = ops.sum(t2)", "t4 = ops.exp(-v)"),
    outputs=("t1", "t3", "t4"),
    updates={"v": "v * 0.5 + t3"},
    steps=3,
)


def test_a_wrong_case_becomes_small():
    def wrong(case):
        program = case.trace()  # or it is none any more
        return "a product: of a and b" if any("@" in line for line in case.lines) and program.outputs else ""

    assert shrunk(SMALL, wrong) == Case(
        lengths={"n": 0, "a": 1, "b": 1},
        leaves={"x": "input n a float32 whole", "w": "variable a b float32 whole"},
        lines=("t1 = x @ w",),
        outputs=("t1",),
    )


@pytest.mark.parametrize("name", ["t1", "t3", "state v"])
def test_an_error_is_seen_and_rounding_is_not(name):
    right = expected(SMALL)
    outputs = run_alone(SMALL, by_numpy)
    assert right.wrong(outputs) == ""
    assert right.wrong({**outputs, name: outputs[name] + np.float32(0.001) * (1 + abs(outputs[name]))}).startswith(name)
    assert "shape" in right.wrong({**outputs, name: outputs[name][None]})


def test_what_rounding_decides_is_not_judged():
    lines = ("t0 = ops.sum(x, -1)", "t1 = ops.cast(t0 > ops.sum(x[:, ::-1], -1), 'float32')", "t2 = t0 * 2")
    case = dataclasses.replace(SMALL, lines=lines, outputs=("t1", "t2"), updates={})
    right = expected(case)
    assert np.isnan(right.tolerances["t1"]).any()
    assert np.isfinite(right.tolerances["t2"]).all()


def test_what_cancels_in_attention_is_not_judged():
    """Of a single source all scores count alike: their gradient is 0, or what rounding leaves of it."""
    case = Case(
        lengths={"n": 2},
        leaves={name: f"input n {length} 1 5 float32 normal" for name, length in (("q", 3), ("k", 1), ("v", 1))},
        lines=(
            "t0 = ops.dot_product_attention(q, k, v)",
            "t1 = gradients(ops.sum(t0 * ops.sin(t0)), [q])[0]",
            "t2 = ops.cast(ops.tanh(t1) < t1, 'float32')",
        ),
        outputs=("t0", "t1", "t2"),
    )
    right = expected(case)
    assert np.isnan(right.tolerances["t2"]).any()
    assert (right.tolerances["t1"] > 0).all()
    assert right.tolerances["t0"].max() < 1e-4


@pytest.mark.long
def test_nearly_everything_is_judged():
    judged, elements = np.sum([expected(program(seed)).judged for seed in range(40)], axis=0)
    assert judged > 0.95 * elements
