"""Generated sources compile with NVIDIA's nvcc for every supported architecture, without spilling registers."""

import functools
import itertools
import re
import subprocess

import numpy as np
import pytest

import dptrain as dp
from dptrain import ops
from dptrain.backend.cuda import tma
from dptrain.backend.cuda.compile import command, parse_resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.generate import Kernel, source
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.models.explaining import program_of
from dptrain.program.dims import Dim
from dptrain.program.program import trace
from tests.ops.test_attention_on_cuda import inputs_of
from tests.ops.test_attention_on_cuda import step_of as step_of_attention
from tests.ops.test_convolutions_on_cuda import cnn
from tests.ops.test_every_op_on_cuda import program_of_all
from tests.ops.test_programs_on_cuda import mlp, shapes_program
from tests.programs.corpus import CORPUS

HALVES = ("bfloat16", "float16")
ARCHITECTURES = ["sm_75", "sm_80", "sm_90a"]
# What is assembled from an architecture's PTX as well, which takes a third of the time of compiling it. No kernel has
# code of its own for these. What no other source needs more registers for than a training is compiled for one alone.
ASSEMBLED = {"sm_80": ["sm_90", "sm_100", "sm_120"]}
_FOR_ONE = {
    "every_op",
    "narrow_types",
    "sums",
    "loops",
    *(f"products_64_{precision}" for precision in ("tf32", "bfloat16")),
}
# What is compiled for each of these by itself, as a training does it: assembled from the PTX of another architecture,
# some of these spill where they otherwise do not, and others the other way round.
_BY_ITSELF = {"products_64_float32", "products_2048_float32"}
# What every run compiles: for its own instructions, the source that needs the most registers.
SAMPLE = {"sm_90a": {"step_bfloat16"}}
# No training computes in float64 on a GPU, nor a map of every op at once: that source may spill, but is to compile.
# Seconds that nvcc may take for a source; the longest takes half a minute of a core.
_PATIENCE = 400
_QUICKLY = ["-Xcicc", "-O1", "-Xptxas", "-O0"]


def apart(composition):
    """Return the source of a program with a launch for each function.

    In one launch, the function that needs the most registers would hide what becomes of the others by themselves; and
    a launch of many functions takes nvcc minutes.
    """
    launches = [launch for stage in composition.stages for launch in stage]
    alone = [
        Kernel(f"run_{function.name}", [function], launch.threads)
        for launch in launches
        for function in launch.functions
    ]
    return source(alone, wide_index=False)


def program_of_products(length, precision, layouts=("nn", "nt", "tn", "tt")):
    """Return a product in each layout, which takes a tile as large as the matrices allow.

    A precision is of float32 matrices, or half a type.
    """

    def step(a, b):
        if precision in HALVES:
            a, b = ops.cast(a, precision), ops.cast(b, precision)
        transposed_a, transposed_b = ops.transpose(a), ops.transpose(b)
        outputs = {
            "nn": ops.relu(a @ b + 1.0),
            "nt": a @ transposed_b,
            "tn": transposed_a @ b,
            "tt": transposed_a @ transposed_b,
        }
        return {name: outputs[name] for name in layouts}

    return trace(step, {"a": ((Dim.rows(length), length), "float32"), "b": ((length, length), "float32")})


def products(length, precision, layouts=("nn", "nt", "tn", "tt"), of_halves="half"):
    """Return the source of these products."""
    precision_of_others = "float32" if precision in HALVES else precision
    program = program_of_products(length, precision, layouts)
    return apart(Composition(program, precision=precision_of_others, of_halves=of_halves))


@functools.cache
def step_of(compute="float32"):
    """Return a training step on MNIST's shapes, which takes longer to make than to compose."""
    return mlp(np.random.default_rng(0), 784, 128, 10, 128, 60_000, compute=compute)[0]


def recurrent(units, rows=32, dtype=None):
    """Return a training step of recurrent layers of two widths, behind a table of rows."""
    layers = dp.layers
    policy = None if dtype is None else dp.DTypePolicy(f"mixed_{dtype}")
    model = dp.Sequential(
        [
            layers.Input((200,), dtype="int32"),
            layers.Embedding(1000, 64),
            layers.Bidirectional(layers.GRU(units[0], return_sequences=True, dtype=policy)),
            layers.LSTM(units[1], dtype=policy),
            layers.Dense(10, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", device="cpu")
    return program_of(model, rows)


def in_one_launch(rows, dtype=None):
    """Return the source of the loops of recurrent layers, each one launch."""
    composition = Composition(recurrent((63, 128), rows, dtype))
    launches = (launch for stage in composition.stages for launch in stage)
    loops = [function for launch in launches for function in launch.functions if function.name.startswith("loop")]
    assert len(loops) == len(composition.in_one_launch) == 6
    return source([Kernel(f"run_{loop.name}", [loop], 256) for loop in loops], wide_index=False)


def attention(width, dtype="float32"):
    """Return the source of attention and its gradients, of heads so wide, with a mask and causal."""
    specs, _ = inputs_of((70, 90, 2, width, width), "B11S")
    functions = apart(Composition(trace(step_of_attention(True, dtype), specs)))
    assert functions.count("    attention_gradients<") == 2
    return functions


def by_tensor_maps(schedule, dtype="bfloat16"):
    """Return the source of products by tensor maps, in all layouts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tma, "SCHEDULE", schedule)
        text = products(2048, dtype, of_halves="wgmma")
    assert text.count(" product_tma<") == 4
    return text


def of_warpgroups():
    """Yield names and sources of what sm_90a alone compiles: products by warpgroups, with tiles of both widths."""
    for length, dtype in ((2048, "bfloat16"), (1024, "float16")):
        yield f"products_{length}_{dtype}", products(length, dtype, of_halves="wgmma")
    layers, _ = mlp(np.random.default_rng(0), 1024, 2048, 10, 1024, 2048, compute="bfloat16")
    yield "step_bfloat16", apart(Composition(layers, of_halves="wgmma"))
    for name, options in (
        ("convolutions_strides_1", {}),
        ("convolutions_strides_2", {"strides": 2}),
        ("normalized", {"normal": True}),
    ):
        of_images, _ = cnn(
            np.random.default_rng(0), (28, 28, 64), (128, 256), 10, 128, 200, compute="bfloat16", **options
        )
        yield name, apart(Composition(of_images, of_halves="wgmma"))
    for number, schedule in enumerate(tma.SCHEDULES.values()):
        yield f"tma_{number}", by_tensor_maps(schedule, HALVES[number % 2])


def sources(architecture):
    """Yield names and sources: training steps and the product of each precision that needs the most registers.

    Of half precision on sm_75, the products that it computes in float32. For sm_80 also loops, sums of all kinds,
    extremes of narrow types, products with every tile, of the largest in every layout, and once every op. No kernel but
    that of sm_90a has code of its own for an architecture: what one compiles without a warning all do, and what they
    differ in is how registers are given out.
    """
    if architecture == "sm_90a":
        yield from of_warpgroups()
        return
    lengths, layouts = (2048,), {"float32": ("tn",), "tf32": ("nn",), "bfloat16": ("tt",), "float16": ("nt",)}
    if architecture == "sm_80":
        lengths, layouts = (64, 512, 2048), dict.fromkeys(layouts, ("nn", "nt", "tn", "tt")) | {"float16": ("nt",)}
        yield "every_op", apart(Composition(program_of_all("float32")[0]))
        yield "narrow_types", Composition(CORPUS["extremes of narrow types"].trace()).source()
        yield "sums", Composition(shapes_program(np.random.default_rng(0), 700)[0]).source()
        launched = Composition(recurrent((256, 256)))
        assert not launched.in_one_launch
        yield "loops", launched.source()
        yield "recurrent_bfloat16", in_one_launch(200, "bfloat16")
        yield "attention_128_bfloat16", attention(128, "bfloat16")
    for rows in (32, 500):
        yield f"recurrent_{rows}_float32", in_one_launch(rows)
    for width in (32, 64, 128):
        yield f"attention_{width}_float32", attention(width)
    networks = {"convolutions": {"strides": 2}, "normalized": {"strides": 2, "normal": True}}
    for precision, (name, options) in itertools.product(("float32", "tf32"), networks.items()):
        of_images, _ = cnn(np.random.default_rng(0), (28, 28, 1), (32, 64), 10, 128, 200, **options)
        yield f"{name}_{precision}", apart(Composition(of_images, precision=precision))
    for precision in ("float32", "tf32"):
        yield f"step_{precision}", Composition(step_of(), precision=precision).source()
    for dtype in HALVES:
        of_halves = "float32" if architecture == "sm_75" else "half"
        yield f"step_{dtype}", Composition(step_of(dtype), of_halves=of_halves).source()
    for name, options in networks.items() if architecture == "sm_80" else ():
        of_images, _ = cnn(np.random.default_rng(0), (28, 28, 1), (32, 64), 10, 128, 200, compute="bfloat16", **options)
        yield f"{name}_bfloat16", apart(Composition(of_images, of_halves=of_halves))
    for precision in layouts:
        for length in lengths if precision != "float16" else lengths[-1:]:  # which differs in one instruction
            of_tile = layouts[precision] if length == 2048 else ("nn", "tn")  # smaller tiles need fewer registers
            yield f"products_{length}_{precision}", products(length, precision, of_tile)


def test_kernels_have_no_code_of_their_own_for_an_architecture():
    """Which is why most sources are compiled for one of them."""
    for path in kernels_dir().iterdir():
        assert "__CUDA_ARCH__" not in path.read_text() or path.suffix == ".md", path


def run(line):
    """Run nvcc, to which a warning is an error, and return what it says; some pointers keep it busy for hours."""
    line = [*line, "-Werror", "all-warnings"]
    finished = subprocess.run(line, capture_output=True, text=True, check=False, timeout=_PATIENCE)
    assert finished.returncode == 0, finished.stderr
    return finished.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "whole"),
    [
        *((name, False) for name in SAMPLE),
        *(pytest.param(name, True, marks=pytest.mark.long) for name in ARCHITECTURES),
    ],
)
def test_compiles_without_spills(nvcc, architecture, whole, tmp_path, record_property):
    known_codes = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout.split()
    if architecture.removesuffix("a") not in known_codes:  # which sm_90a is not listed beside
        pytest.skip(f"this nvcc does not know {architecture}")
    others = [target for target in ASSEMBLED.get(architecture, ()) if target in known_codes and whole]
    rows, expected = [], set()
    for name, text in sources(architecture):
        if not whole and name not in SAMPLE[architecture]:
            continue
        if (
            architecture == "sm_75"
            and name.startswith(("step_tf32", "convolutions_tf32", "normalized_tf32", "products"))
            and not name.endswith("_float32")
        ):
            continue  # whose tensor cores know neither TF32 nor bfloat16
        built = [architecture, *(() if name in _FOR_ONE else others)]
        expected |= {(target, name) for target in built}
        place = tmp_path / f"{name}.cu"
        place.write_text(text)
        quickly = _QUICKLY if name == "every_op" else []
        if len(built) > 1 and name not in _BY_ITSELF:
            assembly = place.with_suffix(".ptx")
            line = command(nvcc, place, assembly, architecture.replace("sm", "compute"))
            run(["--ptx" if word == "--cubin" else word for word in line] + quickly)
            place = assembly
        assert bool(re.search("product_(wgmma|tma)<", text)) == (architecture == "sm_90a")
        for target in built:
            line = [*command(nvcc, place, tmp_path / f"{name}.cubin", target), "-Xptxas", "-v"]
            messages = run(line + quickly)
            assert "serialized" not in messages, messages  # wgmma, where its registers are used between
            frames = set(re.findall(r"(\d+) bytes stack frame", messages))
            assert quickly or frames == {"0"}, messages  # of arrays and structs in local memory
            for kernel, usage in parse_resources(messages).items():
                rows.append((target, name, kernel, usage.registers, usage.shared, usage.spilled))
    assert {(target, name) for target, name, *_ in rows} == expected
    assert whole or expected == {(architecture, name) for name in SAMPLE[architecture]}
    assert not whole or architecture != "sm_80" or expected >= {("sm_80", name) for name in _FOR_ONE}
    table = [" " * 93 + " registers  shared memory  spills (bytes)"]
    for target, name, kernel, registers, shared_bytes, spills in sorted(rows):
        table.append(f"{target:6} {name:22} {kernel[:62]:62}  {registers:9}  {shared_bytes:13}  {spills:6}")
    record_property("table", "\n".join(table))
    spilling = {(target, name) for target, name, *_, spills in rows if spills and name != "every_op"}
    assert not spilling


def test_functions_of_integers_need_no_header_of_the_host(nvcc, tmp_path):
    """Which `every_op` shows too, in a long run; the emulator's own headers are those of a host."""

    def step(x, y):
        names = ("left_shift", "right_shift", "bitwise_xor", "gcd", "lcm", "floor_divide")
        return {name: getattr(ops, name)(x, y) for name in names}

    shape = (Dim.rows(8), 4)
    place = tmp_path / "bits.cu"
    place.write_text(apart(Composition(trace(step, {"x": (shape, "int32"), "y": (shape, "int32")}))))
    assert "dp_left_shift(" in place.read_text()
    run(command(nvcc, place, tmp_path / "bits.cubin", "sm_80"))
