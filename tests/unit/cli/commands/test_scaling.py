"""`python -m dptrain explain --ranks`: its options, tables and words."""

import re
from dataclasses import replace

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend.cuda.compile import Resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.cost.loads import loads
from dptrain.backend.cuda.cost.roofline import GPUS, predict_step
from dptrain.cli.commands import scaling
from dptrain.cli.commands.scaling import cpu_hardware, of_model
from dptrain.cli.main import main
from dptrain.cli.measuring import Rates, stated
from dptrain.cli.options.scaling_options import ScalingOptions
from dptrain.models.explaining import program_of
from dptrain.program.cost.hardware import Hardware, Link
from dptrain.program.explain import COLUMNS

CPU = ["--device", "cpu", "--gflops", "100", "--memory-bandwidth", "40GB", "--link", "5GB,5us"]
GPU = ["--device", "cuda", "--node-gpus", "8", "--network", "200Gb"]
MODES = ("data parallel", "hierarchical all-reduce", "ZeRO-1", "FSDP", "tensor parallel", "pipeline")


@pytest.fixture
def ask(capfd):
    """Return what prints the command's report, as lines."""

    def report(*arguments):
        assert main(["explain", *arguments]) == 0
        return capfd.readouterr().out.splitlines()

    return report


def text(lines):
    """Return lines as words, wherever they were broken."""
    return " ".join(" ".join(lines).split())


def table(lines, mode):
    """Return a mode's rows, by ranks."""
    start = next(number for number, line in enumerate(lines) if line.startswith(f"{mode}: "))
    heads, *rows = (re.split(r"  +", line.strip()) for line in lines[start + 1 : lines.index("", start)])
    return {int(row[0]): dict(zip(heads, row, strict=True)) for row in rows}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--ranks 0", "--ranks 0: expected a range of integers >= 1, such as 1-1024"),
        ("--ranks 8-1", "--ranks 8-1: expected the smaller number first, 1-8"),
        ("--ranks 1-x", "--ranks 1-x: expected a range"),
        ("--ranks 1-2-4", "--ranks 1-2-4: expected a range"),
        (f"--ranks 1-{'9' * 5000}", "expected a range of integers >= 1"),
        ("--ranks 1-65537", "--ranks 1-65537: expected 65536 ranks at most"),
        ("--ranks 5-7", "--ranks 5-7: expected a range with a power of two in it, such as 4-7"),
        (
            "--ranks 2 --network fast",
            "--network fast: expected bits or bytes per second, such as 200Gb, 25GB or 25GB,5us",
        ),
        ("--ranks 2 --network 0Gb", "--network 0Gb: expected bits"),
        ("--ranks 2 --link 5GB,fast", "--link 5GB,fast: expected bits"),
        ("--ranks 2 --node-gpus 0", "--node-gpus 0: expected an integer >= 1"),
        ("--ranks 2 --gflops nan", "--gflops nan: expected a number > 0"),
        ("--ranks 2 --memory-bandwidth much", "--memory-bandwidth much: expected bits"),
        ("--ranks 2 --gpu V100", "--gpu V100: expected A100, H100 or H200"),
        ("--ranks 2 --gpu H100 --device cpu", "--gpu H100: needs --device cuda"),
        ("--ranks 2 --scaling up", "--scaling up: expected strong or weak"),
        ("--ranks 2 --kernels", "--ranks predicts training steps: leave out --kernels, --code and --step"),
        ("--ranks 2 --step test", "--ranks predicts training steps"),
        ("--network 200Gb", "--network 200Gb: needs --ranks; add it, such as --ranks 1-64"),
    ],
)
def test_what_is_not_understood_is_said_in_one_line_before_a_machine_is_measured(
    capfd, monkeypatch, arguments, message
):
    monkeypatch.setattr("dptrain.cli.commands.explain.hardware_of", lambda *_: pytest.fail("a machine is measured"))
    assert main(["explain", *arguments.split()]) == 2
    printed = capfd.readouterr().err.strip()
    assert message in printed
    assert "\n" not in printed


def test_tables_of_gpus(ask):
    lines = ask("--ranks", "1-1024", *GPU, "--hidden", "512,512", "--batch-size", "8192")
    assert max(map(len, lines)) <= COLUMNS
    tables = {mode: table(lines, mode) for mode in MODES}
    assert all(list(rows) == [2**n for n in range(11)] for rows in tables.values())
    first = tables["data parallel"][1]
    assert first["eff."] == "100.0%"
    parameters = 784 * 512 + 512 * 512 + 512 * 10 + 2 * 512 + 10
    assert first["weights"] == first["gradients"] == f"{4 * parameters / 1e6:.3g}MB"
    assert first["slots"] == f"{8 * parameters / 1e6:.3g}MB"
    for rows in tables.values():
        assert {**rows[1], "mesh": "", "sent": "0B", "memory": ""} == {**first, "mesh": "", "memory": ""}
    assert tables["data parallel"][8]["sent"] == f"{4 * parameters / 1e6:.3g}MB"
    assert (tables["tensor parallel"][64]["mesh"], tables["pipeline"][64]["mesh"]) == ("8 x 8", "32 x 2")
    marks = [sum(rows[ranks]["memory"].endswith("*") for rows in tables.values()) for ranks in tables["FSDP"]]
    assert marks == [1] * 11, "one best mode for each number of ranks"


def test_words(ask):
    small = text(ask("--ranks", "1-1024", *GPU, "--hidden", "128", "--batch-size", "128"))
    assert small.startswith("Use one rank: data parallel, ")
    assert re.search(r"More than \d+ ranks? for one training gain nothing: ", small)
    assert re.search(
        r"Independent runs use them better: a sweep of 1024 runs .* each on 1 rank, trains \d+ times", small
    )
    assert re.search(r"leaves a GPU idle for \d\d% of the time: several runs on each, in packs", small)
    large = text(ask("--ranks", "1-8", *GPU, "--hidden", "2048,2048", "--batch-size", "262144"))
    assert re.search(r"Use up to 8 ranks: .* \(7\.\d+ times the speed of one rank, 9\d% efficiency\)", large)
    assert "idle" not in large
    assert "gain nothing" not in large


def test_what_does_not_fit_into_a_gpu(ask, monkeypatch):
    hidden = ["--hidden", "1024,1024", "--batch-size", "1024", "--ranks", "1-64"]
    monkeypatch.setattr(scaling, "_fits", lambda plan, hardware: plan.memory.total < 20e6)
    lines = ask(*GPU, *hidden)
    assert "One rank would need " in text(lines)
    assert table(lines, "data parallel")[64]["memory"].endswith("!")
    assert table(lines, "FSDP")[64]["memory"].endswith("MB")
    monkeypatch.setattr(scaling, "_fits", lambda plan, hardware: False)
    assert "No mode fits into 80GB per rank: use a smaller model or batch, or more ranks." in ask(*GPU, *hidden)


def test_weak_scaling_keeps_the_rows_of_a_rank(ask):
    strong, weak = (
        table(ask("--ranks", "1-64", *GPU, "--hidden", "512", "--batch-size", "1024", "--scaling", kind), "FSDP")
        for kind in ("strong", "weak")
    )
    assert strong[1] == weak[1]
    assert weak[64]["activations"] == weak[2]["activations"] != strong[64]["activations"]
    assert float(weak[64]["eff."][:-1]) > float(strong[64]["eff."][:-1])


def test_gradients_in_half_precision_take_less_time_between_nodes(ask):
    options = ["--ranks", "128", *GPU, "--hidden", "4096,4096", "--batch-size", "32768"]
    own, half = (
        {mode: table(ask(*options, *words), mode)[128] for mode in ("data parallel", "ZeRO-1", "pipeline")}
        for words in ([], ["--comm-dtype", "bfloat16"])
    )
    assert float(half["data parallel"]["sent"][:-2]) == pytest.approx(float(own["data parallel"]["sent"][:-2]) / 2)
    for mode in ("data parallel", "ZeRO-1"):
        assert float(half[mode]["eff."][:-1]) > float(own[mode]["eff."][:-1])
    assert half["pipeline"] == own["pipeline"], "stages refuse it"


def test_precision_and_stated_numbers(ask):
    def alone(*more):
        return ask("--ranks", "1", *GPU, "--hidden", "1024", "--batch-size", "32768", *more)

    def milliseconds(lines):
        time, unit = table(lines, "data parallel")[1]["step"].split()
        return float(time) * {"us": 1e-3, "ms": 1.0}[unit]

    plain, fast = alone(), alone("--precision", "tf32")
    assert milliseconds(fast) < milliseconds(plain) / 2
    assert milliseconds(alone("--gflops", "4690")) > 5 * milliseconds(plain)
    assert "products reach float32 13,650, tf32 109,200, half 218,400 Gflop/s" in text(alone("--gpu", "a100"))
    assert "network of a node 1GB/s, 7 us" in text(alone("--network", "8Gb,7us"))


def test_a_cpu_is_measured_where_nothing_is_stated(ask, monkeypatch):
    def measurement(backend, comm):
        assert backend.name == "cpu"
        return Rates(123e9, 45e9, None)

    monkeypatch.setattr(scaling, "measured", measurement)
    options = ["--device", "cpu", "--ranks", "1-4", "--hidden", "8"]
    output = text(ask(*options))
    assert "products reach float32 123 Gflop/s, memory 45GB/s;" in output
    assert "measured here" in output
    assert "float32 99 Gflop/s, memory 45GB/s;" in text(ask(*options, "--gflops", "99"))
    monkeypatch.delattr(scaling, "measured")
    assert "CPU, stated; products reach float32 100 Gflop/s, memory 40GB/s;" in text(ask(*options, *CPU))


def test_measured_rates_are_options():
    assert stated(Rates(1.5e11, 4e10, Link(5e9, 4e-6))) == "--gflops 150 --memory-bandwidth 40GB --link 5GB,4us"


def test_options_about_gpus_choose_gpus(ask):
    options = ["--ranks", "1-2", "--hidden", "8", "--node-gpus", "8", "--network", "200Gb"]
    assert "machine: H100, SXM, " in text(ask(*options))
    assert "machine: A100, SXM, " in text(ask("--ranks", "1", "--hidden", "8", "--gpu", "A100"))
    assert "CPU, stated; " in text(ask(*options, *CPU))


def test_modes_of_a_convolutional_network():
    """Whatever layers there are, every mode can be placed."""
    model = dp.Sequential(
        [
            dp.layers.Input((8, 8, 1)),
            dp.layers.Conv2D(4, 3, activation="relu"),
            dp.layers.BatchNormalization(),
            dp.layers.MaxPooling2D(),
            dp.layers.Flatten(),
            dp.layers.Dropout(0.2),
            dp.layers.Dense(6),
            dp.layers.Dense(3, "softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu")
    hardware = cpu_hardware(Rates(1e11, 4e10, None), 4, 4)
    predictions = [mode.predict(8, 32, hardware) for mode in of_model(model, 32)]
    assert [prediction.mode for prediction in predictions] == list(MODES)
    assert all(np.isfinite(prediction.seconds) and prediction.sent > 0 for prediction in predictions)
    assert predictions[3].memory.weights < predictions[0].memory.weights


def test_axes_travel_beside_each_other_and_messages_do_not_wait_for_ops():
    """Sums of activations pass buckets of gradients, of which some are ready before the backward pass reaches them."""
    model = dp.Sequential([dp.layers.Input((64,)), *(dp.layers.Dense(64, "relu") for _ in range(5))])
    model.compile("adam", "mse", device="cpu")
    scaling_of = {mode.parallelism.name: mode for mode in of_model(model, 512, bucket_mb=0.02)}
    machine = Hardware({"float32": 1e9}, 1e9, 0.0, 0.0, 0.0, 2, Link(1e9, 1e-6), Link(1e7, 1e-5))

    def seconds(apart, urgent):
        hardware = replace(machine, axes_apart=apart, urgent=urgent)
        return scaling_of["tensor parallel"].predict(8, 4096, hardware).seconds

    assert seconds(True, True) < min(seconds(True, False), seconds(False, True))
    assert max(seconds(True, False), seconds(False, True)) < seconds(False, False)


def test_gathers_of_new_weights_travel_beside_the_next_step():
    model = dp.Sequential([dp.layers.Input((64,)), *(dp.layers.Dense(64, "relu") for _ in range(5))])
    model.compile("adam", "mse", device="cpu")
    modes = {mode.parallelism.name: mode for mode in of_model(model, 512, bucket_mb=0.02)}
    machine = Hardware({"float32": 1e9}, 1e9, 0.0, 0.0, 0.0, 8, Link(1e8, 1e-6), Link(1e7, 1e-5))
    late, at_the_end, blocking = (
        {name: modes[name].predict(8, 4096, replace(machine, **fields)).seconds for name in modes}
        for fields in ({}, {"late": False}, {"late": True, "overlaps": False})
    )
    gathers = machine.collective("all_gather", 4 * 5 * 64 * 65, 8)
    assert late["ZeRO-1"] < at_the_end["ZeRO-1"] - 0.5 * gathers
    assert {name for name in modes if late[name] != at_the_end[name]} == {"ZeRO-1"}
    assert blocking["ZeRO-1"] >= at_the_end["ZeRO-1"], "a CPU computes, then sends"


@pytest.mark.parametrize(("hidden", "batch"), [([128], 1024), ([1024, 1024], 1024), ([1024, 1024], 8192)])
def test_a_step_on_one_gpu_takes_what_its_kernels_take(hidden, batch):
    """As `explain --kernels` predicts them, at the GPU's peaks; registers as nvcc gives them to products."""
    model = dp.Sequential(
        [dp.layers.Input((784,)), *(dp.layers.Dense(units, "relu") for units in hidden), dp.layers.Dense(10, "softmax")]
    )
    model.compile("adam", "sparse_categorical_crossentropy", device="cuda")
    composition = Composition(program_of(model, batch))
    resources = {kernel.name: Resources(128, 0, kernel.shared or 0) for kernel in loads(composition)}
    kernels = predict_step(loads(composition, resources), GPUS[1])
    options = ScalingOptions([1], False, None, "H100", None, None, GPUS[1].peaks["FP32"], None)
    hardware, _ = scaling._of_gpus(options, "float32")
    (prediction, *_) = of_model(model, batch)
    assert prediction.predict(1, batch, hardware).seconds == pytest.approx(kernels, rel=0.4)
