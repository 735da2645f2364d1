"""What nvcc makes of products of half precision and of attention: the instructions that they are written for."""

from typing import NamedTuple

import numpy as np
import pytest

from dptrain import ops
from dptrain.backend.cuda import tma
from dptrain.backend.cuda.compile import command, parse_resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.roofline import GPUS, Load, blocks_per_processor
from dptrain.backend.cuda.frames import columns
from dptrain.backend.cuda.generate import Kernel, source
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from tests.gpu.machine_code import Code, codes_of, resources_of
from tests.gpu.test_kernels_for_hardware import apart, attention, by_tensor_maps, products, program_of_products, run
from tests.ops.test_convolutions_on_cuda import cnn
from tests.sample import sample

H100 = next(gpu for gpu in GPUS if gpu.name == "H100")


class Case(NamedTuple):
    """Products that are compiled together.

    Attributes:
        architecture: for which.
        what: the length of matrices, or the strides of convolutions.
        layouts: of the matrices; none for convolutions.
        per_copy: instructions that a copy of 16 bytes takes at most; most where rows are places, in the gradient of a
            convolution's kernel.
        blocks: of a kernel that a multiprocessor holds at once, at least.
    """

    architecture: str
    what: int
    layouts: tuple[str, ...]
    per_copy: int
    blocks: int

    def __str__(self) -> str:
        return f"{self.architecture}-{self.what}-{'-'.join(self.layouts) or 'convolutions'}"


ALL = ("nn", "nt", "tn", "tt")
CASES = [
    Case("sm_90a", 2048, ("tn",), 6, 1),
    Case("sm_80", 64, ("nn",), 18, 5),
    Case("sm_90a", 1, (), 28, 1),
    Case("sm_90a", 2048, ALL, 6, 1),
    Case("sm_90a", 1024, ALL, 6, 1),
    Case("sm_80", 2048, ALL, 12, 1),
    Case("sm_80", 512, ALL, 16, 4),
    Case("sm_80", 64, ALL, 18, 5),
    Case("sm_90a", 2, (), 28, 1),
]


def composed(case):
    """Return the kernels of a case's program, of which one computes a single product."""
    of_halves = "wgmma" if case.architecture == "sm_90a" else "half"
    if case.layouts:
        return Composition(program_of_products(case.what, "bfloat16", case.layouts), of_halves=of_halves)
    rng, shape = np.random.default_rng(0), (28, 28, 64)
    network, _ = cnn(rng, shape, (128, 256), 10, 128, 200, compute="bfloat16", strides=case.what)
    return Composition(network, of_halves=of_halves)


@pytest.mark.slow
@pytest.mark.parametrize("case", sample(CASES, len(CASES), single=True), ids=str)
def test_products_are_what_they_are_written_for(nvcc, case, tmp_path):
    composition = composed(case)
    kernel = "product_wgmma<" if case.architecture == "sm_90a" else "product_half<"
    functions = [function for stage in composition.stages for launch in stage for function in launch.functions]
    alone = [
        Kernel(f"run_{function.name}", [function], function.threads)
        for function in functions
        if kernel in "".join(function.body)
    ]
    launches = {launch.name: launch for launch in alone}
    assert len(launches) == len(case.layouts) if case.layouts else launches
    place, cubin = tmp_path / "products.cu", tmp_path / "products.cubin"
    place.write_text(source(alone, wide_index=False))
    reported = parse_resources(run([*command(nvcc, place, cubin, case.architecture), "-Xptxas", "-v"]))
    codes, resources = codes_of(cubin), resources_of(cubin)
    assert set(codes) == set(reported) == set(resources) == set(launches)
    for name, code in codes.items():
        assert code.generic() == code.local() == [], name
        assert code.count(r"LDGSTS\..*\b128\b") >= 4, name
        for length, copies in code.copies():
            assert length <= case.per_copy * copies, f"{name}: {length} instructions for {copies} copies"
        if case.architecture == "sm_90a":
            assert code.count("HGMMA") == 4, name
            assert code.used_before_the_wait() == [], name
            unwaited = Code([line.replace("gsb0, 0x0", "gsb0, 0x1") for line in code.lines], code.labels)
            assert unwaited.used_before_the_wait(), "the wait is what is looked for"
        else:
            assert code.count("HMMA.16816.F32.BF16"), name
            assert code.count("LDSM.16.M"), name
        assert resources[name].spilled == reported[name].spilled == 0, name
        # What `explain` reckons with is what stands in the file, which for 9.0 counts what the system takes as well.
        registers, shared = reported[name].registers, reported[name].shared + launches[name].dynamic
        reserved = 1024 if case.architecture == "sm_90a" else 0
        assert (registers, reported[name].shared + reserved) == (resources[name].registers, resources[name].shared), (
            name
        )
        load = Load(name, 0, launches[name].threads, shared, registers, 0, 0, 0, {})
        assert blocks_per_processor(load, H100) >= case.blocks, name


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", tma.SCHEDULES)
def test_products_by_tensor_maps_are_what_they_are_written_for(nvcc, name, tmp_path):
    """Few instructions copy, and a whole block's threads have the registers that they need."""
    place, cubin, schedule = tmp_path / "product.cu", tmp_path / "product.cubin", tma.SCHEDULES[name]
    place.write_text(by_tensor_maps(schedule))
    reported = parse_resources(run([*command(nvcc, place, cubin, "sm_90a"), "-Xptxas", "-v"]))
    codes = {kernel: code for kernel, code in codes_of(cubin).items() if code.count("HGMMA")}
    assert len(codes) == 4
    for kernel, code in codes.items():
        assert code.generic() == code.local() == [], kernel
        assert code.count("HGMMA.64x256x16.F32.BF16") == 4, kernel
        assert code.used_before_the_wait() == [], kernel
        # Boxes of a and b; where one is not K-major, a loop over panels, or as many instructions as it has.
        assert code.count(r"UTMALDG\.2D") >= 2, kernel
        assert (code.count(r"UTMALDG\.2D\.MULTICAST") > 0) == (schedule.cluster > 1), kernel
        assert code.count(r"UTMACCTL\.IV") == 2, "both maps are acquired"
        assert code.count("UCGABAR_WAIT") == 2, kernel
        assert code.count(r"SYNCS\.PHASECHK") >= 4, "a wait tries once, then in a loop with a limit"
        assert code.count(r"BPT\.TRAP") > 0, kernel
        assert reported[kernel].spilled == 0, kernel
        assert reported[kernel].registers * tma.THREADS <= 65_536, kernel


def codes_of_text(nvcc, text, folder, architecture="sm_90a"):
    """Return the machine code of a source's kernels, which spill nothing."""
    place, cubin = folder / "source.cu", folder / "source.cubin"
    place.write_text(text)
    reported = parse_resources(run([*command(nvcc, place, cubin, architecture), "-Xptxas", "-v"]))
    assert {resources.spilled for resources in reported.values()} == {0}
    return codes_of(cubin)


@pytest.mark.slow
@pytest.mark.long
def test_sums_over_rows_wait_once_for_several_rows(nvcc, monkeypatch, tmp_path):
    """Of 16 channels, as in the gradient of a BatchNormalization, whose division is a branch."""

    def loads_at_once():
        specs = {name: ((Dim.rows(64), 32, 32, 16), "float32") for name in ("x", "dy")}
        specs |= {name: ((16,), "float32") for name in ("mean", "deviation")}

        def step(x, dy, mean, deviation):
            return {"sum": ops.sum(dy * ((x - mean) / deviation), (0, 1, 2))}

        (code,) = codes_of_text(nvcc, apart(Composition(trace(step, specs))), tmp_path).values()
        return code.loads_at_once()

    assert loads_at_once() >= 12
    monkeypatch.setattr(columns, "_ROWS_AHEAD", ())
    assert loads_at_once() <= 8, "rows one by one, and addresses"


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90a", "sm_120"])
def test_a_stage_in_float32_is_multiplied_without_a_loop(nvcc, architecture, tmp_path):
    """Of 8 terms, 8 x 16 sums a thread, and six loads of 16 bytes for each term."""
    (code,) = codes_of_text(nvcc, products(2048, "float32", ("nt",)), tmp_path, architecture).values()
    assert code.pieces_with("FFMA", 100) == [8 * 8 * 16]
    assert code.pieces_with(r"LDS\.128", 8) == [8 * 6]


ATTENTION = [
    ("sm_80", 64, "float32", 3),
    ("sm_80", 64, "bfloat16", 2),
    ("sm_80", 32, "float32", 3),
    ("sm_80", 128, "float32", 3),
    ("sm_80", 128, "float16", 2),
    ("sm_90a", 64, "float32", 3),
    ("sm_90a", 128, "bfloat16", 2),
]


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "width", "dtype", "blocks"), sample(ATTENTION, len(ATTENTION)))
def test_attention_is_what_it_is_written_for(nvcc, architecture, width, dtype, blocks, tmp_path):
    """Shared memory is read 16 bytes at once, and a multiprocessor holds several blocks."""
    place, cubin = tmp_path / "attention.cu", tmp_path / "attention.cubin"
    place.write_text(attention(width, dtype))
    reported = parse_resources(run([*command(nvcc, place, cubin, architecture), "-Xptxas", "-v"]))
    codes = {name: code for name, code in codes_of(cubin).items() if "attention" in name}
    assert len(codes) == 3
    for name, code in codes.items():
        assert code.generic() == code.local() == [], name
        if dtype == "float32":
            assert code.count(r"LDS\.128") >= code.count("FFMA") / 24, name
            assert code.count(r"LDS\b") == code.count(r"LDS\.128"), name
        else:
            assert code.count(r"HMMA\.16816\.F32"), name
            assert code.count(r"LDSM\.16\.M88"), name
            assert code.count(r"LDSM\.16\.MT88"), name
        assert reported[name].spilled == 0, name
        is_wide = dtype == "float32" and width == 128 and "gradients" in name
        shared = 53_248 if is_wide else reported[name].shared
        load = Load(name, 0, 128, shared, reported[name].registers, 0, 0, 0, {})
        assert blocks_per_processor(load, H100) >= blocks, name
