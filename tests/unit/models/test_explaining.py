"""What `model.explain()` and `python -m dptrain explain` say of a step."""

import re
import shutil
import subprocess

import numpy as np
import pytest

import dptrain as dp
from dptrain.backend import describe
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.backend.cpu.compile import compiler
from dptrain.backend.cuda.compile import Resources
from dptrain.backend.cuda.compose import Composition
from dptrain.backend.cuda.sources import kernels_dir
from dptrain.cli.main import main
from dptrain.errors import ConfigError, DeviceError
from dptrain.models.explaining import program_of
from dptrain.program.execute import evaluate


def dense() -> dp.Sequential:
    model = dp.Sequential([dp.layers.Dense(5, "relu", input_shape=(4,)), dp.layers.Dense(3, "softmax")], seed=2)
    model.compile("sgd", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cpu", dtype="float64")
    return model


def test_messages_of_gradients_in_half_precision():
    model, nbytes, text = dense(), [], ""
    for comm_dtype in (None, "bfloat16"):
        model.compile("sgd", "mse", comm_dtype=comm_dtype, dtype="float32")
        text = model.explain(8)
        (message_bytes,) = re.findall(r" all-reduces in \d+ messages? of (\d+) bytes", text)
        nbytes.append(int(message_bytes))
    assert nbytes == [4 + 43 * 4, 4 + 43 * 2], "and the loss, in float32"
    assert re.search(r"all_reduce\(%\d+\) +\(4, 5\) +bfloat16 +replicated +20 +40\n", text)


def test_sharded_variables_on_two_ranks():
    model = dp.Sequential([dp.layers.Dense(5, use_bias=False, input_shape=(33,))], seed=2)
    model.compile(dp.optimizers.SGD(0.1, momentum=0.9), "mse", dtype="float64", shard_weights=True)
    text = model.explain(7)
    assert "variables on 2 ranks, mesh batch=2:\n" in text
    table = text.partition("mesh batch=2:\n")[2].splitlines()
    assert re.fullmatch(r"dense/kernel +\(33, 5\) +sharded 0 +\(17, 5\) +680", table[1])
    assert re.fullmatch(r"sgd/dense_kernel_momentum +\(33, 5\) +sharded 0 +\(17, 5\) +680", table[2])
    (extra, full_bytes, kept_bytes) = re.match(
        r"(\d+) more are replicated, (\d+) bytes; a rank holds ([\d,]+)", table[3]
    ).groups()
    assert int(kept_bytes.replace(",", "")) == int(full_bytes) + 2 * 680
    assert int(extra) >= 3
    # Forward, and for no other reader; of the gradient's sum each rank gets its part.
    assert re.search(r"\nall_gather +batch +2 +1 +1 +1,320\n", text)
    assert re.search(r"\nreduce_scatter +batch +2 +1 +1 +1,320\n", text)
    model.compile("sgd", "mse", dtype="float64")
    assert "mesh" not in model.explain(7)


def test_any_mesh_is_explained_in_100_columns(capsys):
    small = ["--hidden", "16", "--input-shape", "6", "--classes", "3"]
    assert main(["explain", *small, "--mesh", "batch=3,model=2", "--shard-weights"]) == 0
    text = capsys.readouterr().out
    assert "variables on 6 ranks, mesh batch=3, model=2:\n" in text
    assert re.search(r"\ndense/kernel +\(6, 16\) +sharded 0, sharded 1 over model +\(2, 8\) +64\n", text)
    assert re.search(r"\nall_reduce +model +2 ", text)
    assert max(map(len, text.splitlines())) <= 100


def test_the_sums_of_a_step():
    text = dense().explain(8)
    assert text.startswith("train step of 'sequential', batches of 8\n")
    # Two products forward, three backward, of 2 B I O operations each; of the first layer's input nobody asks.
    products = [int(size.replace(",", "")) for size in re.findall(r"batch_matmul.* ([\d,]+)  +[\d,]+$", text, re.M)]
    assert sorted(products) == sorted([2 * 8 * 4 * 5] * 2 + [2 * 8 * 5 * 3] * 3)
    assert "43 parameters, 43 of them trained; " in text
    assert re.search(r"\d+ all-reduces in 1 message of \d+ bytes", text)
    match = re.search(r"([\d,]+) bytes of intermediate results at most, ([\d,]+) if", text)
    most, alone = (int(number.replace(",", "")) for number in match.groups())
    assert 8 * 5 * 8 < most < alone
    assert re.search(
        r"\n(\d+) of \1 new values are written over the old ones\n\d+ kernels after fusion, on a CPU$", text
    )


def test_the_program_is_that_of_the_step():
    """Executed, it computes what `predict` does, and one update as `train_on_batch`."""
    x, y = np.random.default_rng(0).normal(size=(8, 4)), np.arange(8) % 3
    model, other = dense(), dense()
    outputs, _ = evaluate(program_of(model, 8, "predict"), {"x": x})
    np.testing.assert_allclose(outputs["output"], other.predict(x, verbose=0), rtol=1e-12)
    _, updates = evaluate(program_of(model, 8), {"x": x, "y": y})
    other.train_on_batch(x, y)
    for mine, theirs in zip(model.weights, other.weights, strict=True):
        np.testing.assert_allclose(updates[mine], theirs.numpy(), rtol=1e-12)


def test_several_inputs_and_outputs_and_values_as_targets():
    a, b = dp.Input((3,), name="a"), dp.Input((2,), name="b")
    joined = dp.layers.Concatenate()([a, b])
    model = dp.Model({"a": a, "b": b}, [dp.layers.Dense(2, name="one")(joined), dp.layers.Dense(4, name="two")(joined)])
    model.compile("adam", ["mse", "sparse_categorical_crossentropy"])
    program = program_of(model, 6, "test")
    assert {name: tuple(map(int, tensor.shape)) for name, tensor in program.inputs.items()} == {
        "x/a": (6, 3), "x/b": (6, 2), "y/0": (6, 2), "y/1": (6,)
    }  # fmt: skip
    assert program.inputs["y/1"].dtype == np.int64


class Own(dp.Model):
    def __init__(self):
        super().__init__()
        self.dense = dp.layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_what_is_missing_is_said():
    model = Own()
    with pytest.raises(ConfigError, match=r"You must call `compile\(\)` before explaining the train step"):
        model.explain()
    model.compile("sgd", "mse")
    with pytest.raises(ConfigError, match="model 'own' does not know the shapes of its inputs: build it"):
        model.explain()
    model.build((None, 3))
    assert "predict step of 'own'" in model.explain(step="predict")
    assert "8 parameters" in model.explain(4, "train")
    with pytest.raises(ConfigError, match="step = 'fit': expected 'train', 'test' or 'predict'"):
        model.explain(step="fit")
    with pytest.raises(ConfigError, match="batch_size = 0: expected an integer >= 1"):
        model.explain(0)


def test_the_command(capfd):
    assert main(["explain", "--hidden", "7", "--batch-size", "12", "--input-shape", "5,4", "--classes", "3"]) == 0
    output = capfd.readouterr().out
    assert "train step of 'explain', batches of 12" in output
    assert f"{20 * 7 + 7 + 7 * 3 + 3} parameters" in output
    assert re.search(r"cast_to\(x\) +\(B, 5, 4\)", output)
    for arguments, message in (
        (["--step", "fit"], "step = 'fit'"),
        (["--input-shape", "28,x"], "--input-shape x: expected an integer >= 1"),
        (["--classes", "1"], "--classes 1: expected an integer >= 2"),
    ):
        assert main(["explain", *arguments]) == 2
        assert message in capfd.readouterr().err


def adam() -> dp.Sequential:
    model = dp.Sequential([dp.layers.Dense(5, "relu", input_shape=(4,)), dp.layers.BatchNormalization()], name="net")
    model.add(dp.layers.Dense(3, "softmax"))
    model.compile(dp.optimizers.Adam(global_clipnorm=1.0), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def test_groups_have_their_sums():
    text = adam().explain(8, kernels=True)
    assert max(map(len, text.splitlines())) <= 100
    sums = re.findall(r"^(\w+): (\d+) ops, ([\d,]+) operations, ([\d,]+) bytes written$", text, re.M)
    assert [name for name, *_ in sums] == ["forward", "backward", "update", "messages"]
    total = re.search(r"^(\d+) ops, ([\d,]+) operations, ([\d,]+) bytes written, ", text, re.M).groups()
    for column, total_cell in enumerate(total, 1):
        assert sum(int(one[column].replace(",", "")) for one in sums) == int(total_cell.replace(",", ""))
    groups = dict(re.findall(r"^(\w+): .*?\n(.*?)\n\n", text, re.M | re.S))
    assert "adam/" not in groups["forward"] + groups["backward"]
    assert groups["forward"].count("batch_matmul") == 2
    assert groups["backward"].count("batch_matmul") == 3
    assert "batch_normalization/moving_mean" in groups["forward"]
    assert "sqrt" in groups["update"]


def test_an_evaluation_has_a_forward_pass_and_messages_alone():
    assert "backward" not in adam().explain(8, "test")


def test_kernels_compute_what_the_tables_show():
    text = adam().explain(8, kernels=True)
    tables, kernels = text.split("\nkernels, with the layers of their ops:\n")
    kernel_ops = set(re.findall(r"(%\d+) (\w+)", kernels))
    assert kernel_ops <= set(re.findall(r"^(%\d+) +(\w+)\(", tables, re.M))
    assert len(re.findall(r"product  [\w, ]+  %", kernels)) == 5
    assert re.search(r"(\d+) kernels after fusion", tables)[1] == re.findall(r"^ +(\d+)  \w", kernels, re.M)[-1]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_kernel_names_the_layers_of_its_ops_and_of_their_gradients(device):
    model = dp.Sequential([dp.Input((8,)), dp.layers.Dense(70, "tanh", name="first"), dp.layers.Dense(3, name="last")])
    model.compile("adam", dp.losses.SparseCategoricalCrossentropy(from_logits=True), device=device)
    description = describe(device, program_of(model, 16), 16)
    products = [
        (layer, sum(tensor.op.name == "batch_matmul" for tensor in kernel.tensors))
        for kernel in description.kernels
        for layer in kernel.layers
    ]
    counts = {name: sum(count for layer, count in products if layer == name) for name in ("first", "last")}
    if device == "cpu":
        assert counts == {"first": 2, "last": 3}  # no gradient of the data
    assert {layer for layer, _ in products} == {"first", "last", "loss", "update"}
    assert sum(kernel.operations for kernel in description.kernels) >= 2 * 16 * (2 * 8 * 70 + 3 * 70 * 3)
    weights = 4 * (8 * 70 + 70 + 70 * 3 + 3)
    assert sum(kernel.read for kernel in description.kernels) > 3 * weights  # with Adam's slots
    assert sum(kernel.written for kernel in description.kernels) > 3 * weights


@pytest.fixture
def no_nvcc(monkeypatch):
    """No nvcc, which would take seconds to count registers."""

    def missing():
        raise DeviceError("no nvcc")

    monkeypatch.setattr("dptrain.backend.cuda.compile.find_nvcc", missing)


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize("step", ["train", "predict"])
def test_memory_and_kernels_are_those_of_the_device(step):
    """What a device takes for intermediate results, and launches, is what is said of it beforehand."""
    model = dp.Sequential([dp.layers.Dense(70, "tanh", input_shape=(40,)), dp.layers.Dense(3, "softmax")])
    reports = {}
    for device, letter in (("cpu", "C"), ("cuda", "G")):
        model.compile("adam", "sparse_categorical_crossentropy", device=device, dtype="float32")
        text = model.explain(16, step, kernels=True)
        most = int(re.search(r"([\d,]+) bytes of intermediate results at most", text)[1].replace(",", ""))
        reports[device] = most, int(re.search(rf"(\d+) kernels after fusion, on a {letter}PU\n", text)[1])
    program = program_of(model, 16, step)
    launches = [launch for stage in Composition(program).stages for launch in stage]
    assert reports["cuda"] == (Composition(program).plan.size, len(launches))
    backend = CpuBackend(jit_compile=True)
    arrays = {name: np.zeros(tuple(map(int, tensor.shape)), tensor.dtype) for name, tensor in program.inputs.items()}
    executable = backend.executable(program, arrays)
    assert reports["cpu"] == (executable.nbytes, len(executable.fused.kernels))
    assert backend.planned_bytes(program, 16) == executable.nbytes
    assert reports["cpu"][1] != reports["cuda"][1]


@pytest.mark.usefixtures("no_nvcc")
def test_kernels_of_loops_are_shown_once(monkeypatch):
    """With how often a step launches them, by which its time is predicted."""
    monkeypatch.setattr("dptrain.backend.cuda.persistent._WEIGHTS", 0)
    seconds = []
    for steps in (10, 40):
        model = dp.Sequential([dp.layers.Input((steps, 4)), dp.layers.SimpleRNN(5), dp.layers.Dense(3)])
        model.compile("sgd", "mse", device="cuda")
        text = model.explain(8, kernels=True)
        assert f"  {steps} times" in text
        seconds.append(
            [float(duration) for duration in re.search(r"^step +([\d.]+) +([\d.]+)", text, re.MULTILINE).groups()]
        )
    for short, long in zip(*seconds, strict=True):
        assert 2 < long / short < 4


@pytest.mark.usefixtures("no_nvcc")
def test_loops_in_one_launch_are_named():
    model = dp.Sequential([dp.layers.Input((10, 4)), dp.layers.GRU(5, return_sequences=True), dp.layers.LSTM(3)])
    model.compile("sgd", "mse", device="cuda")
    text = model.explain(8, kernels=True)
    assert "loops in one launch: 4 of 10 steps\n" in text
    assert " times\n" not in text


def test_how_a_convolution_is_computed_is_shown():
    layers = dp.layers
    shapes = [layers.Conv2D(6, 5, input_shape=(28, 28, 1)), layers.Conv2D(16, 1), layers.Conv2D(32, 3)]
    shapes += [layers.Conv2D(32, 3)]
    text = dp.Sequential([*shapes, layers.Flatten()]).explain(8, "predict", kernels=True)
    assert re.findall("conv2d, (.*)", text) == [
        "by vectors of pixels",
        "a product of matrices",
        "by vectors of channels",
        "by Winograd's F(2x2, 3x3)",
    ]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_code_is_a_source_file(device, tmp_path, capfd):
    (command, _), nvcc = compiler() or (None, None), shutil.which("nvcc")
    if (command if device == "cpu" else nvcc) is None:
        pytest.skip("there is no C++ compiler" if device == "cpu" else "there is no nvcc")
    assert main(["explain", "--device", device, "--hidden", "4", "--input-shape", "3", "--kernels", "--code"]) == 0
    file = tmp_path / ("step.cpp" if device == "cpu" else "step.cu")
    file.write_text(capfd.readouterr().out)
    options = ["-fsyntax-only"] if device == "cpu" else ["-arch=sm_90", "-ptx", "-o", tmp_path / "step.ptx"]
    compilation = [*(command if device == "cpu" else [nvcc]), "-std=c++17", "-w", f"-I{kernels_dir()}", *options, file]
    done = subprocess.run(compilation, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_command_reads_the_shape_of_a_file(tmp_path, capfd):
    table = tmp_path / "houses.csv"
    table.write_text("rooms,area,price\n" + "".join(f"{n % 5},{n}.5,{3 * n}\n" for n in range(40)))
    arguments = ["explain", "--data", str(table), "--target", "price", "--hidden", "7"]
    assert main(arguments) == 0
    output = capfd.readouterr().out
    assert re.search(r"\(B, 7\)", output)
    assert "(B, 28, 28)" not in output
    assert f"{2 * 7 + 7 + 7 + 1} of them trained" in output
    assert main([*arguments, "--input-shape", "6"]) == 0
    assert "(B, 6)" in capfd.readouterr().out
    assert main(["explain", "--data", str(tmp_path / "none.csv")]) == 65


@pytest.mark.usefixtures("no_nvcc")
@pytest.mark.parametrize(("device", "word"), [("cpu", "dp_"), ("cuda", "__global__")])
def test_code_takes_no_device(device, word):
    model = dense()
    model.compile("sgd", "sparse_categorical_crossentropy", device=device)
    text = model.explain(8, kernels=True, code=True)
    comment, _, code = text.partition("*/")
    assert comment.startswith("/*\ntrain step of ")
    assert word in code
    assert "kernels after fusion" not in code
    assert max(map(len, text.splitlines())) <= 100
    assert (
        ("__global__" in text) == ("costs, predicted by a roofline model, not measured" in text) == (device == "cuda")
    )
    assert "costs" not in model.explain(8)
    assert word not in model.explain(8)


def test_registers_are_those_of_the_compiler(monkeypatch):
    def resources(name, text, architecture):
        return {kernel: Resources(99, 0, 0) for kernel in re.findall(r"(run_\w+)\(const Run", text)}

    monkeypatch.setattr("dptrain.backend.cuda.description.resources_of_text", resources)
    model = dense()
    model.compile("sgd", "sparse_categorical_crossentropy", device="cuda")
    _, _, costs = model.explain(8, kernels=True).partition("registers by nvcc for sm_90a:\n")
    numbers = re.findall(r"^ *(\d+) .*  99      0 ", costs, re.M)
    assert numbers == [str(number + 1) for number in range(len(numbers))] != []


def test_the_command_explains_a_run(capfd, tmp_path):
    dense().save(tmp_path / "model.keras")
    assert main(["explain", str(tmp_path), "--step", "predict", "--kernels", "--batch-size", "6"]) == 0
    output = capfd.readouterr().out
    assert "predict step of 'sequential', batches of 6" in output
    assert re.search(r"product  \w+ +%1 batch_matmul", output)
    assert main(["explain", str(tmp_path / "nowhere")]) == 65


def test_help_of_the_command_is_its_own(capfd):
    with pytest.raises(SystemExit):
        main(["explain", "--help"])
    output = capfd.readouterr().out
    assert all(option in output for option in ("--kernels", "--code", "--input-shape", "--hidden"))
    assert not any(option in output for option in ("--epochs", "--checkpoint-every", "--stall-timeout"))


def test_the_stages_of_a_pipeline():
    """The cut lies behind the first layer, whose 5 numbers of each of 8 rows go there and come back."""
    model = dense()
    model.compile("sgd", "sparse_categorical_crossentropy", dtype="float64", stages=2, microbatches=4)
    text = model.explain(8)
    assert "2 stages of a pipeline, 4 microbatches of 2 rows, 1F1B\n" in text
    rows = [line.split() for line in text.splitlines() if re.match(r" +[01]  ", line)]
    assert [row[1:4] + row[7:] for row in rows] == [["200", "200", "0", "dense"], ["144", "152", "0", "dense_1"]]
    assert "\n0 to 1: 4 of microbatches, 320 bytes\n1 to 0: 4 of microbatches, 320 bytes\n" in text
    assert text.endswith("if there are any, sum 200, 152 bytes")
    mixing = [dp.layers.Dense(5), dp.layers.BatchNormalization(name="norm"), dp.layers.Dense(3, "softmax")]
    model = dp.Sequential([dp.Input((4,)), *mixing])
    model.compile("sgd", "sparse_categorical_crossentropy", stages=2)
    assert "1 microbatch of 8 rows, 1F1B: layer 'norm' needs the whole batch at once" in " ".join(
        model.explain(8).split()
    )
    model.compile("sgd", "sparse_categorical_crossentropy", stages=4)
    with pytest.raises(ConfigError, match="stages = 4: the model has 3 layers with weights"):
        model.explain(8)
    with pytest.raises(ConfigError, match="stages = 0: expected an integer >= 1"):
        model.compile("sgd", "mse", stages=0)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_lengths_that_are_none(device):
    ids = dp.Input((None,), dtype="int32")
    x = dp.layers.Embedding(30, 8)(ids)
    steps = dp.Model(ids, dp.layers.Dense(5, "softmax")(dp.layers.MultiHeadAttention(2, 4)(x, x)))
    steps.compile("adam", "sparse_categorical_crossentropy", device=device)
    text = steps.explain(6)
    shared = r"C\+\+ for others is compiled once, with \d+ numbers as parameters"
    said = shared if device == "cpu" else "each other length is compiled for itself"
    assert re.search(rf"\nlengths that are None are 97 here; {said}\n", text + "\n")
    assert re.search(r"\(B, 97, 8\) ", text), "embedded"
    assert re.search(r"one_hot|\(B, 97, 5\) ", text), "a class of each step"


def test_lengths_whose_code_has_other_steps():
    """An op for each step."""
    inputs = dp.Input((None, 2))
    model = dp.Model(inputs, dp.layers.Lambda(lambda x: sum(x[:, n] * n for n in range(x.shape[1])))(inputs))
    text = model.explain(step="predict")
    assert "lengths that are None are 97 here; for 139 other C++ is compiled" in text


def test_known_lengths_are_not_said():
    assert "lengths that are None" not in dense().explain()
