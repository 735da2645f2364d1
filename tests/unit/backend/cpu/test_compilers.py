"""Bits do not depend on the compiler, nor on the CPU it tunes for; of products only on whether the CPU has FMA."""

import functools
import itertools
import platform
import re

import numpy as np
import pytest
from ml_dtypes import bfloat16

from dptrain import ops
from dptrain.backend.cpu import compile as compiling
from dptrain.backend.cpu import compiled
from dptrain.backend.cpu.compiled import CompiledExecutable
from dptrain.errors import DeviceError
from dptrain.program.dims import Dim
from dptrain.program.execute import HostMemory
from dptrain.program.program import trace
from dptrain.program.tensor import Variable
from tests.sample import sample
from tests.unit.backend.cpu.test_convolutions import BY, CASES, MAKES, TILES
from tests.unit.backend.cpu.test_products import HALF_CHAINS, in_tiles, needs_tiles, product

X86 = platform.machine() in ("x86_64", "AMD64")
CPU = set(compiling._cpu().split())
FMA = not X86 or {"avx2", "bmi2", "fma"} <= CPU  # x86-64-v3, which has FMA
TUNED = ("generic", "haswell", "skylake-avx512", "znver3") if X86 else ("generic", "cortex-a72", "neoverse-n1")
# Architecture and what to tune for, as far as this CPU executes it; and what has no FMA.
TARGETS = [("native", "native")] + [("x86-64-v3" if X86 else "armv8-a", tuned) for tuned in TUNED if FMA]
NARROW = [("x86-64-v2", "generic")] if X86 else []
COMPILERS = ("g++", "clang++")
# Deeper than a block of k; no multiple of a vector; as many rows as fill the widest tile, twice, and one more.
K, N, M = 300, 37, 29


def compiled_by(compiler, target, source, headers, options=()):
    """Return a library; skip where the compiler is missing or does not know the CPU."""
    if compiling.compiler_named(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    options = (f"-march={target[0]}", f"-mtune={target[1]}", "-pthread", *options)
    try:
        return compiling.library(source, headers, options, by=compiler)
    except DeviceError as error:
        if re.search("unknown target CPU|bad value|unsupported argument", str(error)):
            pytest.skip(f"{compiler} does not know {target}")
        raise


def matrices(dtype=np.float32):
    """Return a and b whose products float64 adds up without rounding, and float32 does not."""
    rng = np.random.default_rng(0)
    return ((rng.integers(-(2**20), 2**20, shape) * 2.0**-19).astype(dtype) for shape in ((M, K), (K, N)))


@functools.cache
def chains(fma, dtype=np.float32):
    """Return a times b: per block of k a chain of multiply-adds, rounded once or twice each; then the blocks' sum."""
    a, b = (matrix.astype(np.float32) for matrix in matrices(dtype))
    total = np.zeros((M, N), np.float32)
    for block in (range(K // 2), range(K // 2, K)):
        chain = np.zeros((M, N), np.float32)
        for k in block:
            column, line = a[:, k : k + 1], b[k]
            chain = (column.astype(float) * line + chain).astype(np.float32) if fma else column * line + chain
        total += chain
    return total


def wrong_rows(function, expected, dtype=np.float32):
    """Return how many rows of products, of any number of rows in any layout, have other bits than expected."""
    (a, b), wrong, address = matrices(dtype), 0, compiling._address(function)
    for rows, at, bt in itertools.product([*range(1, 16), M], [False, True], [False, True]):
        factor, other = np.asfortranarray(a[:rows]) if at else a[:rows], np.asfortranarray(b) if bt else b
        wrong += np.any(product(factor, other, function=address) != expected[:rows], 1).sum()
    return wrong


@pytest.mark.sample(6, 0)
@pytest.mark.parametrize("target", sample(TARGETS + NARROW, 8, single=True), ids="-".join)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_products_are_chains_however_they_are_compiled(compiler, target):
    library = compiled_by(compiler, target, "DP_PRODUCT(float)", compiling.PRODUCT)
    assert wrong_rows(library.dp_product_float, chains(FMA and target not in NARROW)) == 0


@pytest.mark.long
@pytest.mark.parametrize("target", [TARGETS[0], TARGETS[-1], *NARROW], ids="-".join)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_products_of_half_precision_are_chains_with_and_without_fma(compiler, target):
    """The product of two factors is exact in float32."""
    library = compiled_by(compiler, target, HALF_CHAINS, compiling.PRODUCT)
    for dtype in (bfloat16, np.float16):
        function = library[f"dp_product_dp_{np.dtype(dtype).name}"]
        assert wrong_rows(function, chains(True, dtype), dtype) == 0
        assert np.array_equal(chains(True, dtype), chains(False, dtype))


@needs_tiles
@pytest.mark.parametrize("tuned", ["native", "generic", "znver3"])
@pytest.mark.parametrize("compiler", COMPILERS)
def test_products_in_tiles_however_they_are_compiled(compiler, tuned):
    library = compiled_by(compiler, ("native", tuned), "DP_EXPORT(dp_bfloat16, dp_Tiles)", compiling.TILES)
    expected = in_tiles(*matrices(bfloat16), np.zeros((M, N), np.float32))
    assert wrong_rows(library.dp_product_dp_bfloat16, expected, bfloat16) == 0
    assert np.mean(expected != chains(True, bfloat16)) > 0.5


@pytest.mark.long
@pytest.mark.parametrize("target", [TARGETS[-1], *NARROW], ids="-".join)
def test_convolutions_have_the_same_bits_however_they_are_compiled(target):
    """With FMA: narrower vectors compute the same chains. Without, vectors of pixels those of vectors of channels."""
    text = "".join(f"DP_CONVOLUTION_{implementation.upper()}(float)\n" for implementation in (*BY, "winograd"))
    library = compiled_by("g++", target, text, (*compiling.CONVOLUTION, *compiling.WINOGRAD[-1:]))
    *functions, winograd = (
        compiling._address(library[f"dp_{implementation}_float"]) for implementation in (*BY, "winograd")
    )
    for makes in ("places", "images"):
        operands = TILES["many channels"].arrays(makes, "float32")
        results = [
            TILES["many channels"].computed(makes, *operands, by="winograd", function=function)
            for function in (None, winograd)
        ]
        np.testing.assert_allclose(*results, rtol=0, atol=1e-3 if target in NARROW else 0)
    for name in ("one channel", "to three channels", "to eleven channels", "few channels, many lines"):
        for makes in MAKES:
            operands = CASES[name].arrays(makes, "float32")
            channels, pixels = (CASES[name].computed(makes, *operands, function=function) for function in functions)
            if makes != "kernel":
                np.testing.assert_array_equal(pixels, channels)
            if target not in NARROW:
                np.testing.assert_array_equal(pixels, CASES[name].computed(makes, *operands, by="pixels"))
            np.testing.assert_allclose(pixels, channels, rtol=0, atol=1e-3)


def test_chains_with_fma_are_others():
    assert np.mean(chains(True) != chains(False)) > 0.5


@pytest.mark.skipif(not FMA, reason="this CPU has no FMA")
@pytest.mark.parametrize(
    ("tile", "options"),
    sample(
        [("rows < 3 ? sum[r][v] + one * line[v] : {}", ()), ("sum[r][v] + one * line[v]", ("-ffp-contract=fast",))], 2
    ),
    ids=["by hand", "by GCC"],
)
def test_a_product_that_is_fused_in_some_tiles_alone_is_seen(tile, options):
    """As GCC makes it where it tunes for Zen and may contract."""
    if options and not X86:
        pytest.skip("GCC does so for Zen alone")
    header, multiply_add = compiling._header("native_product.h"), "dp_fma(one, line[v], sum[r][v])"
    assert header.count(multiply_add) == 1
    text = header.replace(multiply_add, tile.format(multiply_add)) + "DP_PRODUCT(float)"
    library = compiled_by("g++", TARGETS[-1], text, compiling.PRODUCT[:-1], options)
    assert wrong_rows(library.dp_product_float, chains(True)) > 0


def generated_by(compiler, target, options=()):
    """Return what a small generated program computes: sums along rows and over them, chains of single elements."""
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((9, 37), (37,)))
    weight = Variable(w)

    def step(x):
        y = ops.tanh(x * weight + 0.1) * x + weight
        shares = ops.softmax(y)
        ops.mean(ops.square(shares - x)).backward()
        return {
            "shares": shares,
            "rows": ops.sum(y * x, -1),
            "columns": ops.sum(y * x, 0),
            "gradient": weight.value.grad,
        }

    program = trace(step, {"x": ((Dim.rows(9), 37), "float32")})
    with pytest.MonkeyPatch.context() as patch:
        by = functools.partial(compiled_by, compiler, target, headers=compiling.HEADERS, options=options)
        patch.setattr(compiled, "library", by)
        executable = CompiledExecutable(program, HostMemory(), {"x": x})
    executable.run()
    return b"".join(array.tobytes() for array in executable.outputs.values())


@pytest.mark.parametrize("target", sample([TARGETS[0], TARGETS[-1], *NARROW], 2, single=True), ids="-".join)
@pytest.mark.parametrize("compiler", COMPILERS)
def test_generated_code_has_the_same_bits_however_it_is_compiled(compiler, target):
    results = {generated_by(compiler, target), generated_by(compiler, target, ("-O0",))}
    assert results == {generated_by("g++", TARGETS[1])}


@pytest.mark.skipif(not FMA, reason="this CPU has no FMA")
def test_generated_code_that_is_contracted_is_seen():
    assert generated_by("g++", TARGETS[1], ("-ffp-contract=fast",)) != generated_by("g++", TARGETS[1])
