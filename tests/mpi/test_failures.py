"""A failure on one rank ends the job: soon, with its exit code, and with a line that says who."""

import os
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ROOT
from tests.launching import Finished, dptrain, in_turn, mpirun
from tests.sample import sample

SCRIPT = str(ROOT / "tests/mpi/scripts/fail.py")


def fail(way: str, bad: int, ranks: int = 3) -> Finished:
    return mpirun(ranks, SCRIPT, way, str(bad), timeout=90)


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad", sample([0, 1], 2, first=1))
@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        ("before mpi", 1, "start-up: ValueError: early (fail.py:"),
        ("before mpi late", 1, "start-up: ValueError: early (fail.py:"),
        ("callback", 70, "training, epoch 1, step 3: RuntimeError: bomb (fail.py:"),
        ("swallowed", 70, "training, epoch 1, step 3: RuntimeError: bomb (fail.py:"),
        ("exit in callback", 3, "training, epoch 1, step 3: SystemExit: 3"),
        ("after fit", 1, "user code: KeyError: 'late' (fail.py:"),
    ],
)
def test_an_exception_on_one_rank_ends_all(way, code, message, bad):
    done = fail(way, bad)
    assert done.code == code
    assert len(done.messages) == 1
    assert done.messages[0].startswith(f"dptrain: rank {bad}/3 host ")
    assert message in done.messages[0]
    assert " pid " in done.messages[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_a_rank_with_an_excepthook_of_its_own_does_not_leave_the_others_at_the_end(tmp_path, bad):
    script = tmp_path / "hook.py"
    script.write_text(
        "import sys, dptrain as dp\n"
        f"if dp.rank() == {bad}:\n    sys.excepthook = sys.__excepthook__\n"
        "model = dp.Sequential([dp.layers.Dense(2, input_shape=(5,))])\nmodel.compile('sgd', 'mse')\n"
        "model.fit([[1.0] * 5] * 8, [[1.0] * 2] * 8, epochs=-1)\n"
    )
    done = mpirun(2, str(script), timeout=90)
    assert done.code == 77
    assert f"left while rank {1 - bad} waits in the end of the job (fit)" in done.err


@pytest.mark.sample(2)
@pytest.mark.parametrize("bad", [0, 1])
def test_an_exception_past_an_excepthook_of_its_own_names_the_rank(tmp_path, bad):
    script = tmp_path / "hook.py"
    script.write_text(
        "import sys, numpy as np, dptrain as dp\n"
        "model = dp.Sequential([dp.layers.Dense(2, input_shape=(5,))])\nmodel.compile('sgd', 'mse')\n"
        "model.fit(np.ones((8, 5)), np.ones((8, 2)), verbose=0)\n"
        f"if dp.rank() == {bad}:\n    sys.excepthook = sys.__excepthook__\n    raise ValueError('at the end')\n"
    )
    done = mpirun(2, str(script), timeout=90)
    assert done.code in (1, 77)
    assert "Traceback" in done.err
    (line,) = [message for message in done.messages if "ValueError" in message]
    assert line.startswith(f"dptrain: rank {bad}/2 host ")
    assert line.endswith("user code: ValueError: at the end (hook.py:7)")


WRONG = [
    ("labels", 65, "y: label 2 at index 5; 2 classes allow 0-1"),
    ("shape", 65, "model expects 4 features of shape (4,), data has 3 of shape (3,)"),
    ("other batch size", 2, "the ranks call fit differently: arguments: rank 0 has ["),
    ("other data", 2, "the training sets (shapes, dtypes, checksum) differ: rank 0 has "),
    ("other weights", 2, "the training sets (shapes, dtypes, checksum) differ: rank 0 has "),
]


@pytest.fixture(scope="module")
def on_three(small_npz, once) -> tuple[dict[str, Finished], Path]:
    """How three ranks take what they all end for, one after the other, and where."""

    def launch(place: Path) -> tuple[dict[str, Finished], Path]:
        ways = [*(way for way, *_ in WRONG), "parameters"]
        cases = {f"{way} {bad}": [SCRIPT, way, str(bad)] for way in ways for bad in (0, 1)}
        cases |= {message: ["-m", "dptrain", *with_data(small_npz, wrong)] for wrong, _, message in BAD_COMMAND_LINES}
        cases |= {name: damaged(small_npz, place / name, *name.split()) for name in DAMAGED}
        return in_turn(3, cases, place / "in turn", cwd=place, seeds=True), place

    return once("failures on three", launch)


@pytest.fixture
def agreed(on_three) -> dict[str, Finished]:
    return on_three[0]


@pytest.fixture
def place(on_three) -> Path:
    return on_three[1]


@pytest.mark.parametrize("bad", [0, 1])
@pytest.mark.parametrize(("way", "code", "message"), WRONG)
def test_wrong_arguments_on_one_rank_are_an_error_on_all_that_names_it(agreed, way, code, message, bad):
    done = agreed[f"{way} {bad}"]
    assert done.code == code
    assert done.err.count("dptrain.errors.AgreedError: ") == 1, "rank 0 speaks for all"
    assert message in done.err
    if not way.startswith("other"):
        assert f"(rank {bad}, host " in done.err


def test_an_error_that_all_agree_on_before_mpi_starts_does_not_wait_for_a_rank_that_is_gone(tmp_path):
    script = tmp_path / "early.py"
    script.write_text(
        "import os\nif os.environ['PMI_RANK'] == '1':\n    raise ValueError('early')\n"
        "from dptrain.comm import current\ncurrent()\n"
    )
    done = mpirun(2, str(script), timeout=90, DPTRAIN_STALL_TIMEOUT="soon")
    assert done.code == 77
    assert "dptrain: DPTRAIN_STALL_TIMEOUT = 'soon': expected seconds, or 0 for no limit" in done.err
    assert "ended before it imported dptrain while rank 0 waits in the start of MPI (start-up)" in done.err


UNSEEDED = """
import sys, numpy as np, dptrain as dp
if sys.argv[2:]:
    dp.utils.set_random_seed(0)
model = dp.Sequential([dp.layers.Dense(2, input_shape=(5,))])
model.compile('sgd', 'mse')
draw = lambda: (np.random.rand(8, 5), np.random.rand(8, 2))
ways = {'fit': lambda: model.fit(*draw()), 'evaluate': lambda: model.evaluate(*draw()),
        'generator': lambda: model.fit((draw() for _ in range(3)), shuffle=False)}
ways[sys.argv[1]]()
"""
NOBODY_CAN = [
    ("fit(x, y, sample_weight=np.ones((8, 3)))", "sample_weight: expected (8,) real numbers, one per sample"),
    ("fit(x, y, epochs=1.5)", "epochs = 1.5: expected an integer >= 0"),
    ("fit(x, y, validation_data=(x, y), validation_batch_size=1)", "batch_size = 1 is the global batch and leaves"),
    ("evaluate(x, y, batch_size='8')", "batch_size = '8': expected an integer >= 1"),
    ("predict(x, steps=0)", "steps = 0: expected an integer >= 1"),
    ("train_on_batch(x[:0], y[:0])", "the training set is empty"),
    ("test_on_batch(x[:0], y[:0])", "the training set is empty"),
]
CALLED = """
import sys, numpy as np, dptrain as dp
model = dp.Sequential([dp.layers.Dense(6, input_shape=(5,)), dp.layers.Reshape((2, 3))])
model.compile('sgd', 'mse')
x, y = np.ones((8, 5)), np.ones((8, 2, 3))
eval("model." + sys.argv[1])
"""
OF_NUMPY = """
import os, numpy as np, dptrain as dp
x, y = np.ones((32, 1)), np.ones((32, 2))
two = 2 if os.environ.get('PMI_RANK') == '0' else np.int64(2)
model = dp.Sequential([dp.layers.Dense(2, input_shape=(1,))])
model.compile(dp.optimizers.SGD(np.float32(0.5)), 'mse')
more = {'validation_data': (x, y), 'validation_freq': two, 'steps_per_epoch': two, 'verbose': 0}
history = model.fit(x, y, batch_size=np.int64(8), epochs=two, **more).history
assert (len(history['loss']), len(history['val_loss'])) == (2, 1), history
"""
CONFIGURED = """
import os, sys
from dptrain.cli.main import main
more = ['--epochs', '7'] if os.environ['PMI_RANK'] == sys.argv[1] else []
sys.exit(main([*sys.argv[2:], *more]))
"""


@pytest.fixture(scope="module")
def on_two(small_npz, once) -> dict[str, Finished]:
    """How two ranks take what they all end for, one after the other."""

    def launch(folder: Path) -> dict[str, Finished]:
        scripts = {"unseeded": UNSEEDED, "called": CALLED, "of NumPy": OF_NUMPY, "configured": CONFIGURED}
        for name, text in scripts.items():
            (folder / name).write_text(text)
        ways = [["evaluate"], ["generator"], ["fit", "seeded"]]
        cases = {f"unseeded {' '.join(way)}": [str(folder / "unseeded"), *way] for way in ways}
        cases |= {call: [str(folder / "called"), call] for call, _ in NOBODY_CAN}
        cases |= {"of NumPy": [str(folder / "of NumPy")]}
        arguments = ["--data", str(small_npz), "--out", str(folder / "run")]
        cases |= {f"configured {bad}": [str(folder / "configured"), str(bad), *arguments] for bad in (0, 1)}
        cases |= {f"nodes {bad}": nodes(small_npz, folder / f"nodes {bad}", bad) for bad in (0, 1)}
        return in_turn(2, cases, folder / "in turn", cwd=folder)

    return once("failures on two", launch)


def test_data_drawn_without_a_seed_is_refused_with_how_to_seed_it(on_two, tmp_path):
    (tmp_path / "unseeded.py").write_text(UNSEEDED)
    alone = mpirun(2, str(tmp_path / "unseeded.py"), "fit")
    for done, code in ((alone, 2), (on_two["unseeded evaluate"], 2), (on_two["unseeded generator"], 65)):
        assert done.code == code
        assert "seed random numbers, with dp.utils.set_random_seed(0) at the top" in done.messages[-1], done.err
    assert on_two["unseeded fit seeded"].code == 0


@pytest.mark.parametrize(("call", "message"), NOBODY_CAN)
def test_what_no_rank_can_do_is_said_once(on_two, call, message):
    done = on_two[call]
    assert done.code == (65 if "sample_weight" in call else 2)
    assert done.err.count(f"AgreedError: {message}") == 1, done.err


def test_numbers_of_numpy_are_arguments_as_pythons_are(on_two):
    assert on_two["of NumPy"].code == 0, on_two["of NumPy"].err


@pytest.mark.parametrize("bad", [0, 1])
def test_parameters_that_diverge_on_one_rank_end_all(agreed, bad):
    done = agreed[f"parameters {bad}"]
    assert done.code == 76
    assert done.err.count("dptrain.errors.AgreedError: ") == 1, "rank 0 speaks for all"
    assert f"the replicas differ after step 8 of epoch 1: rank {bad} (host " in done.err
    assert " from the others in 'dense/kernel'" in done.err


def test_the_job_ends_within_a_second_of_the_failure(tmp_path):
    """The failing rank notes the time; interpreter start-up is not counted."""
    script = tmp_path / "late.py"
    script.write_text(
        "import os, time, numpy as np, dptrain as dp\n"
        "from dptrain.comm import current\n"
        "comm = current(); comm.barrier()\n"
        "if comm.rank == 1:\n"
        f"    open({str(tmp_path / 'time')!r}, 'w').write(str(time.time())); raise ValueError('x')\n"
        "comm.barrier()\n"
    )
    done = mpirun(3, str(script), timeout=90)
    assert done.code == 1
    assert time.time() - float((tmp_path / "time").read_text()) < 20, "a second, and what a loaded machine adds"


def test_a_damaged_picture_of_the_part_that_validates_is_told_once(tmp_path):
    image = pytest.importorskip("PIL.Image", reason="pictures need the extra 'images'")
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for picture in range(6):
            pixels = rng.integers(0, 255, (9, 9, 3), dtype=np.uint8)
            image.fromarray(pixels).save(tmp_path / "pets" / name / f"{picture}.png")
    path = tmp_path / "pets" / "dog" / "1.png"
    content = bytearray(path.read_bytes())
    content[content.index(b"IDAT") + 10] ^= 0xFF
    path.write_bytes(content)
    arguments = ("--image-size", "8x8", "--batch-size", "8", "--hidden", "3", "--jit-compile", "off", "--fast-dev-run")
    done = dptrain(2, "--data", "pets", *arguments, cwd=tmp_path)
    assert done.code == 65
    (line,) = [line for line in done.err.splitlines() if line.startswith("dptrain: ")]
    assert "pets/dog/1.png: damaged" in line


# How the data is damaged, how it is divided, and on which rank.
DAMAGED = [
    f"{kind} {sharding} {bad}"
    for kind in ("missing", "html", "truncated")
    for sharding in ("global", "static")
    for bad in (0, 1)
]


def start(folder) -> str:
    """Return a script that is the command line, on each rank in a folder of its own."""
    (folder / "start.py").write_text(
        f"import os, sys\nos.chdir(os.path.join({str(folder)!r}, os.environ['PMI_RANK']))\n"
        "from dptrain.cli.main import main\nsys.exit(main(sys.argv[1:]))\n"
    )
    return str(folder / "start.py")


def damaged(small_npz, folder, kind, sharding, bad) -> list[str]:
    """Return a training's script and arguments; each rank has a folder of its own, as on nodes that share no files."""
    for rank in range(3):
        (folder / str(rank)).mkdir(parents=True)
        path = folder / str(rank) / "small.npz"
        content = small_npz.read_bytes()
        if str(rank) != bad:
            path.write_bytes(content)
        elif kind == "html":
            path.write_bytes(b"<!DOCTYPE html><html>not found</html>")
        elif kind == "truncated":
            path.write_bytes(content[:-50])
    return [start(folder), "--data", "./small.npz", "--sharding", sharding, "--epochs", "1", "--out", "run"]


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_data_on_one_rank(agreed, place, name):
    done, bad = agreed[name], name[-1]
    assert done.code == 65, done.err
    assert len(done.messages) == 1
    assert done.messages[0].startswith("dptrain: ")
    assert f"(rank {bad}, host " in done.messages[0]
    assert "small.npz" in done.messages[0]
    assert "Traceback" not in done.err
    assert not (place / name / "0" / "run").exists(), "nothing is written before the data is known to be good"


@pytest.mark.parametrize("bad", [0, 1])
def test_different_configurations(on_two, bad):
    done, values = on_two[f"configured {bad}"], ["5", "5"]
    values[bad] = "7"
    assert done.code == 2
    assert done.messages == [
        f"dptrain: the ranks are set up differently: train.epochs: rank 0 has {values[0]}, rank 1 has {values[1]}"
    ]


BAD_COMMAND_LINES = [
    (["--learing-rate", "1"], 2, "unknown '--learing-rate'; did you mean '--learning-rate'?"),
    (["--optimizer.learning_rate", "nan"], 2, "optimizer.learning_rate = 'nan', set on the command line: "),
    (["--nesterov"], 2, "optimizer.nesterov = True: adam has no nesterov"),
    (
        ["--clipnorm", "1", "--clipvalue", "2"],
        2,
        "Only one of `clipnorm`, `clipvalue` and `global_clipnorm` can be",
    ),
    (["trian"], 2, "unknown command 'trian'; did you mean 'train'?"),
    (["--batch-size", "2"], 2, "use at least 3, or mpirun -n 2"),
    (["--data", "mnits"], 2, "did you mean 'mnist'?"),
    (["--data", "/nowhere/at/all"], 65, "/nowhere/at/all not found"),
    (["--device", "cuda"], 69, "--device cuda: PyCUDA is not installed: pip install 'pycuda>=2026.1'"),
    (["--config", "/nowhere.yaml"], 2, "No such file"),
    (["--epochs"], 2, "--epochs"),
    (["--steps-per-epoch", "9999"], 2, "gives 8 steps"),
    (["--train.shards_per_batch", "99999999"], 2, "a global batch has 128 samples; use at most 128"),
    (["--reproducible", "--comm-dtype", "float16"], 2, "comm_dtype = 'float16': not supported with a fixed number of"),
    (["--hidden", "2000000000,2000000000"], 69, "MemoryError: Unable to allocate "),
    (["--data", "/dev/zero"], 65, "/dev/zero: cannot be read (it is a character device, expected a regular file)"),
]


@pytest.fixture(scope="module")
def bad_alone(small_npz, once) -> dict[str, Finished]:
    """How one process takes bad command lines, by what it is to say; all of them in turn."""
    cases = {message: ["-m", "dptrain", *with_data(small_npz, wrong)] for wrong, _, message in BAD_COMMAND_LINES}
    del cases["use at least 3, or mpirun -n 2"]
    return once("failures alone", lambda folder: in_turn(0, cases, folder / "in turn", cwd=folder))


def with_data(data, arguments: list[str]) -> list[str]:
    more = [] if "--data" in arguments else ["--data", str(data)]
    return [*arguments, *more] if arguments[0] == "trian" else [*more, *arguments]


@pytest.mark.parametrize(("arguments", "code", "message"), BAD_COMMAND_LINES)
def test_bad_command_lines_are_one_line_on_any_number_of_ranks(agreed, bad_alone, arguments, code, message):
    for done in (agreed[message], bad_alone[message]) if "--batch-size" not in arguments else (agreed[message],):
        assert done.code == code, done.err
        assert len(done.messages) == 1, done.err
        assert message in done.messages[0]
        assert "Traceback" not in done.err
        assert [line for line in done.out.splitlines() if not line.startswith("dptrain ")] == []


@pytest.mark.parametrize("ranks", [0, 3])
def test_output_that_cannot_be_written(small_npz, tmp_path, ranks):
    (tmp_path / "file").write_text("")
    done = dptrain(ranks, "--data", str(small_npz), "--out", str(tmp_path / "file" / "run"), timeout=90)
    assert done.code == 74
    assert len(done.messages) == 1
    assert "Not a directory; choose another --out" in done.messages[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("ranks", [0, 2])
def test_divergence(small_npz, tmp_path, ranks):
    arguments = ["--optimizer", "sgd", "--learning-rate", "1e38", "--out", str(tmp_path / "run")]
    done = dptrain(ranks, "--data", str(small_npz), *arguments, timeout=90)
    assert done.code == 76, done.err
    assert len(done.messages) == 1
    # Which of these makes a NaN of infinities depends on the order in which this processor's BLAS adds.
    ops = "op ('batch_matmul' of|'subtract' behind) layer 'dense_1' is the first to produce a NaN"
    assert re.search(rf"training diverged in step 2 of epoch 1: {ops}", done.messages[0])
    assert ", of sample " in done.messages[0]


def test_a_launcher_of_another_mpi_is_refused():
    """Open MPI's mpirun starts MPICH's processes as worlds of one: each would train alone and overwrite the others."""
    alone = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"}
    clean = {name: "" for name in os.environ if name.startswith("PMI_")}
    done = dptrain(0, "--fast-dev-run", timeout=90, **alone, **clean)
    assert done.code == 2
    assert "Open MPI started 4 processes, but MPI " in done.err
    assert "sees a world of 1" in done.err


def test_torchrun_is_refused_in_one_line_and_mpi_beside_its_variables_is_not(small_npz, tmp_path):
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = dptrain(0, "--data", str(small_npz), cwd=tmp_path, **torchrun)
    assert done.code == 2
    assert len(done.err.splitlines()) == len(done.messages) == 1
    assert "mpirun -n 2" in done.messages[0]
    assert list(tmp_path.iterdir()) == []
    done = dptrain(2, "--data", str(small_npz), "--fast-dev-run", cwd=tmp_path, **torchrun)
    assert (done.code, done.err) == (0, "")
    assert sum("CPU, " in line for line in done.out.splitlines()) == 2


def nodes(small_npz, folder, bad) -> list[str]:
    """Return a training's script and arguments, each rank of which has data of its own."""
    with np.load(small_npz) as data:
        arrays = dict(data)
    for rank in range(2):
        (folder / str(rank)).mkdir(parents=True)
        kept = {name: array[: 100 if rank == bad else None] for name, array in arrays.items()}
        np.savez(folder / str(rank) / "small.npz", **kept)
    return [start(folder), "--data", "./small.npz"]


@pytest.mark.parametrize("bad", [0, 1])
def test_nodes_with_different_files(on_two, bad):
    done = on_two[f"nodes {bad}"]
    assert done.code == 2
    assert len(done.messages) == 1
    assert done.messages[0].startswith("dptrain: the ranks see different data: x_train: rank 0 has [[")


BROKEN_COMPILER = """#!/bin/sh
case "$*" in *--version*) exec c++ "$@";; esac
for target; do :; done
BREAK
"""


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.parametrize(
    ("deed", "message"),
    sample(
        [('echo nothing > "$target"', "does not load: file too short"), ("exit 3", "fails on a generated program")], 2
    ),
)
def test_ranks_whose_compiler_is_broken_say_so_once(small_npz, tmp_path, deed, message):
    compiler = tmp_path / "compiler"
    compiler.write_text(BROKEN_COMPILER.replace("BREAK", deed))
    compiler.chmod(0o755)
    environment = {"CXX": str(compiler), "DPTRAIN_CACHE": str(tmp_path / "cache"), "DPTRAIN_JIT_COMPILE": None}
    done = dptrain(2, "--data", str(small_npz), "--fast-dev-run", **environment)
    assert done.code == 69, done.err
    (line,) = done.messages
    assert line.startswith("dptrain: rank 0/2 ")
    assert message in line
