"""Training with `--device cuda`, on the emulated driver: the CPU's numbers, alone and with two ranks."""

import functools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from tests.conftest import ROOT
from tests.emulated import emulated_ranks, inside_emulator, skip_without_emulator
from tests.launching import dptrain, run
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
STANDINS = ROOT / "tests" / "standins"
DIFFERENT = """
import numpy as np, dptrain as dp
from dptrain import comm
rank = comm.current().rank
model = dp.Sequential([dp.layers.Dense(2, input_shape=(3,))])
model.compile("sgd", "mse", device="cuda", precision="tf32" if rank else "float32")
model.fit(np.zeros((8, 3), np.float32), np.zeros((8, 2), np.float32), verbose=0)
"""
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "every_step.py")


@pytest.fixture(scope="module")
def steps(small_npz, tmp_path_factory):
    """Return a function that trains 26 steps and returns what the script saved."""
    skip_without_emulator()
    place = tmp_path_factory.mktemp("steps")

    @functools.cache
    def train(device: str, ranks: int, task: str) -> dict[str, np.ndarray]:
        out = place / f"{device}, {ranks}, {task}.npz"
        done = emulated_ranks(ranks, SCRIPT, str(small_npz), str(out), device, task, EMULATOR_DEVICES="2")
        assert (done.code, done.err) == (0, "")
        with np.load(out) as saved:
            return dict(saved)

    return train


# Of dropout, Adam and files on two ranks: test_files_on_cuda.py; of a regression: custom_op in test_examples.py.
@pytest.mark.parametrize(("ranks", "task"), sample([(0, "classify"), (2, "layers")], 2))
def test_the_losses_of_the_cpu(steps, ranks, task):
    cpu, cuda = steps("cpu", 0, task), steps("cuda", ranks, task)
    assert len(cuda["losses"]) == 26
    for name in ("losses", "val"):
        np.testing.assert_allclose(cuda[name], cpu[name], rtol=1e-4, err_msg=name)
    np.testing.assert_allclose(cuda["prediction"], cpu["prediction"], rtol=1e-3, atol=1e-4)
    assert cuda["losses"][-1][0] < cuda["losses"][0][0]


@pytest.mark.long
def test_two_runs_have_the_same_bits(steps, small_npz, tmp_path):
    first = steps("cuda", 2, "layers")
    random = {"EMULATOR_ORDER": "shuffled", "EMULATOR_STREAMS": "random", "EMULATOR_DEVICES": "2"}
    done = emulated_ranks(2, SCRIPT, str(small_npz), str(tmp_path / "out.npz"), "cuda", "layers", **random)
    assert (done.code, done.err) == (0, "")
    with np.load(tmp_path / "out.npz") as saved:
        second = dict(saved)
    for name in first:
        assert first[name].tobytes() == second[name].tobytes(), name


def command(data: Path, *more: str) -> list[str]:
    return ["-m", "dptrain", "--device", "cuda", "--data", str(data), "--epochs", "1", "--batch-size", "200", *more]


def quick(data: Path, *more: str) -> list[str]:
    """Two steps of a small model, for tests of what stands before them."""
    return command(data, "--hidden", "20", "--fast-dev-run", *more)


@pytest.mark.long
def test_fixed_shards_give_the_same_bits_on_any_number_of_ranks(small_npz, tmp_path):
    saved = []
    for ranks in (0, 2):
        out = tmp_path / f"{ranks} ranks"
        more = ["--train.shards_per_batch", "4", "--hidden", "20", "--out", str(out)]
        done = emulated_ranks(ranks, *command(small_npz, *more), EMULATOR_DEVICES="2")
        assert (done.code, done.err) == (0, "")
        saved.append(weights_in(out))
    assert saved[0] == saved[1]


def weights_after(data: Path, out: Path, ranks: int, *more: str, **options: str) -> dict[str, bytes]:
    done = emulated_ranks(
        ranks, *command(data, "--hidden", "20", "--out", str(out), *more), EMULATOR_DEVICES="2", **options
    )
    assert (done.code, done.err) == (0, "")
    return weights_in(out)


def weights_in(out: Path) -> dict[str, bytes]:
    weights = safetensors.numpy.load_file(out / "model.safetensors")
    return {name: weights[name].tobytes() for name in sorted(weights)}


STAGED = ["--hidden", "20", "--dropout", "0.2", "--train.steps_per_epoch", "2"]


@pytest.fixture(scope="module")
def staged(small_npz, tmp_path_factory) -> Path:
    """Where a pipeline of two GPUs, which hands over through the host, leaves its trace, and in `run` what it made."""
    folder = tmp_path_factory.mktemp("staged")
    more = [*STAGED, "--stages", "2", "--out", str(folder / "run")]
    # The checks make other bits: whoever compares some is checked as well.
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_TRACE": str(folder / "trace"), "EMULATOR_SANITIZE": "all"}
    done = emulated_ranks(2, *command(small_npz, *more), **options)
    assert (done.code, done.err) == (0, "")
    return folder


@pytest.mark.long
def test_stages_on_two_gpus_train_what_one_cpu_trains(small_npz, staged, tmp_path):
    done = dptrain(0, *command(small_npz)[2:], *STAGED, "--device", "cpu", "--out", str(tmp_path / "run"), cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    alone, together = (
        safetensors.numpy.load_file(folder / "run" / "model.safetensors") for folder in (tmp_path, staged)
    )
    assert list(alone) == list(together)
    for name, weight in alone.items():
        np.testing.assert_allclose(together[name], weight, rtol=1e-3, atol=1e-5, err_msg=name)


@pytest.mark.long
def test_stages_that_hand_over_from_gpu_to_gpu_have_the_same_bits(small_npz, staged, tmp_path):
    """The same losses and weights, without a race, and nothing but what the stand-in sends is copied to the host."""
    more = [*STAGED, "--stages", "2", "--comm", "nccl", "--out", str(tmp_path / "run")]
    # By the stand-in a stream waits for a rank, whose emulated GPU stands still while its host waits: no late work.
    options = {"EMULATOR_STREAMS": "inorder", "EMULATOR_SANITIZE": "all"}
    options |= {"PYTHONPATH": f"{ROOT}:{STANDINS}", "TMPDIR": str(tmp_path), "EMULATOR_DEVICES": "2"}
    options |= {"EMULATOR_TRACE": str(tmp_path / "trace")}
    done = emulated_ranks(2, *command(small_npz, *more), **options)
    assert (done.code, done.err) == (0, ""), done.err
    assert weights_in(tmp_path / "run") == weights_in(staged / "run")
    losses = [
        json.loads((folder / "run" / "summary.json").read_text())["metrics"]["loss"] for folder in (tmp_path, staged)
    ]
    assert losses[0] == losses[1]
    copied, usually_copied = copies_to_host(tmp_path / "trace"), copies_to_host(staged / "trace")
    assert not copied - usually_copied
    mask, activations = 25 * 20, 25 * 20 * 4  # of a microbatch, which rank 0 keeps or gives away
    assert usually_copied[mask] == usually_copied[activations] == 2 * 8
    assert copied[mask] == 0
    assert copied[activations] == 2 * 8  # the stand-in sends them from the host


@pytest.fixture(scope="module")
def usual(small_npz, tmp_path_factory) -> Path:
    """Where two ranks leave the trace of a training in which nothing else is asked for, and in `run` what it made."""
    folder = tmp_path_factory.mktemp("usual")
    weights_after(small_npz, folder / "run", 2, EMULATOR_TRACE=str(folder / "trace"))
    return folder


@pytest.fixture(scope="module")
def usual_weights(usual) -> dict[str, bytes]:
    """What two ranks train where nothing else is asked for."""
    return weights_in(usual / "run")


# Ways that gradients and samples may take, all to the same end; 0.01 MB are 2500 of the 15910 parameters.
OTHER_WAYS = {
    "buckets of shards": ["--bucket-mb", "0.01", "--train.shards_per_batch", "2"],
    "buckets, streamed samples": ["--bucket-mb", "0.01", "--data.device_mb", "0.4"],
    "NCCL": ["--bucket-mb", "0.03", "--comm", "nccl"],
    "ZeRO-1 by NCCL, beside the next steps": ["--bucket-mb", "0.03", "--comm", "nccl", "--shard-optimizer"],
}


@pytest.mark.long
@pytest.mark.parametrize("way", OTHER_WAYS)
def test_gradients_and_samples_on_another_way_give_the_same_bits(small_npz, usual_weights, tmp_path, way):
    random = {"EMULATOR_STREAMS": "random", "EMULATOR_SEED": "3"}
    random |= {"PYTHONPATH": f"{ROOT}:{STANDINS}", "TMPDIR": str(tmp_path)}
    assert weights_after(small_npz, tmp_path / "other", 2, *OTHER_WAYS[way], **random) == usual_weights


@pytest.mark.long
def test_samples_that_no_gpu_could_hold(tmp_path):
    """3.1 MB of them on a GPU of 3 MB."""
    rng = np.random.default_rng(0)
    x, y = rng.integers(0, 256, (4000, 28, 28), np.uint8), rng.integers(0, 10, 4000)
    data = tmp_path / "large.npz"
    np.savez(data, x_train=x, y_train=y, x_test=x[:100], y_test=y[:100])
    more = ["--train.steps_per_epoch", "30", "--batch-size", "100"]
    resident = weights_after(data, tmp_path / "resident", 0, *more)
    assert weights_after(data, tmp_path / "streamed", 0, *more, EMULATOR_MEMORY="3M") == resident


@pytest.fixture(scope="session")
def claims_cuda(tmp_path_factory) -> str:
    """A library by which MPI says that it is CUDA-aware. On the emulator that is true: device memory is the host's."""
    folder = tmp_path_factory.mktemp("claims")
    source, library = folder / "claims.c", folder / "claims.so"
    source.write_text("int MPIX_Query_cuda_support(void) { return 1; }")
    subprocess.run(["g++", "-shared", "-fPIC", "-x", "c", str(source), "-o", str(library)], check=True)
    return str(library)


def copies_to_host(trace: Path) -> Counter[int]:
    """Return how often rank 0 has copied so many bytes from its GPU to the host."""
    events = json.loads(trace.with_name(f"{trace.name}.rank0").read_text())["traceEvents"]
    return Counter(event["args"]["bytes"] for event in events if event["name"].startswith("cuMemcpyDtoH"))


@pytest.mark.long
def test_device_memory_for_mpi(small_npz, usual, usual_weights, tmp_path, claims_cuda):
    """The same bits, and no gradient is copied to the host: six of 15910 parameters in the usual training."""
    more, trace = ["--comm", "cuda-aware", "--bucket-mb", "0.02"], tmp_path / "trace"
    options = {"LD_PRELOAD": claims_cuda, "EMULATOR_TRACE": str(trace)}
    assert weights_after(small_npz, tmp_path / "direct", 2, *more, **options) == usual_weights
    copied, usually_copied = copies_to_host(trace), copies_to_host(usual / "trace")
    assert not copied - usually_copied
    assert (usually_copied - copied).total() == 6
    assert sum((usually_copied - copied).elements()) >= 6 * 15910 * 4


@pytest.mark.long
def test_device_memory_for_an_mpi_that_does_not_know_gpus(small_npz, tmp_path):
    arguments = quick(small_npz, "--comm", "cuda-aware")
    refused = emulated_ranks(2, *arguments, EMULATOR_DEVICES="2", cwd=tmp_path)
    assert refused.code == 69
    (message,) = refused.messages
    assert "--comm cuda-aware: this MPI library does not report CUDA support" in message
    alone = emulated_ranks(0, *arguments, cwd=tmp_path)  # nobody to hand anything to
    assert (alone.code, alone.err) == (0, "")
    cpu = dptrain(2, "--data", str(small_npz), "--device", "cpu", "--comm", "cuda-aware", cwd=tmp_path)
    assert cpu.code == 2
    assert "--comm cuda-aware needs --device cuda: this rank computes on CPU" in cpu.err


def test_an_mpi_that_only_says_that_it_knows_gpus(small_npz, tmp_path, claims_cuda):
    """The crash is another process's; here it cannot even find a driver."""
    script = "from dptrain.comm.cuda_aware import why_not; print(why_not())"
    done = run([sys.executable, "-c", script], LD_PRELOAD=claims_cuda, PYTHONPATH=str(ROOT))
    assert (done.code, done.err) == (0, "")
    assert "claims to be CUDA-aware, but fails with device memory" in done.out
    assert "libcuda.so.1" in done.out


@pytest.mark.long
def test_a_checked_run_finds_nothing(small_npz, tmp_path):
    """No access out of bounds, no unwritten memory, no race, in a whole short training."""
    more = ["--hidden", "20", "--dropout", "0.2", "--train.steps_per_epoch", "2", "--out", str(tmp_path / "run")]
    done = emulated_ranks(0, *command(small_npz, *more), EMULATOR_SANITIZE="all", EMULATOR_ORDER="reverse")
    assert (done.code, done.err) == (0, "")


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_epochs_after_the_first_take_and_free_no_memory(tmp_path, ranks):
    """Freeing waits for all that the device has to do."""
    script = str(ROOT / "tests" / "e2e" / "scripts" / "epochs_on_cuda.py")
    counts = []
    for epochs in (1, 4):
        trace = tmp_path / f"{epochs}.json"
        done = emulated_ranks(ranks, script, str(epochs), EMULATOR_TRACE=str(trace), EMULATOR_DEVICES="2")
        assert (done.code, done.err) == (0, "")
        events = json.loads((trace.with_name(f"{trace.name}.rank0") if ranks else trace).read_text())["traceEvents"]
        counts.append(Counter(event["name"] for event in events if event["cat"] == "memory"))
        assert set(counts[-1]) == {"cuMemAlloc", "cuMemFree", "cuMemHostAlloc", "cuMemFreeHost"}
    assert counts[0] == counts[1]


@pytest.mark.long
def test_kernels_are_compiled_once_for_all_ranks(small_npz, tmp_path):
    cache = tmp_path / "cache"
    for _ in range(2):
        done = emulated_ranks(2, *quick(small_npz), EMULATOR_DEVICES="2", DPTRAIN_CACHE=str(cache), cwd=tmp_path)
        assert (done.code, done.err) == (0, "")
        files = {path.name for path in (cache / "kernels").iterdir()}
        cubins = {name for name in files if name.endswith(".cubin")}
        assert files == {name + ending for name in cubins for ending in ("", ".lock", ".sha256")}
        # Programs for training, for the validation and for the predictions that a confusion matrix counts, whatever the
        # ranks' rows; digests of the state.
        assert len(cubins) == 4


@pytest.mark.long
def test_products_in_tf32(small_npz, tmp_path):
    """Close to float32's numbers, but not the same: the flag reaches the kernels."""
    losses = {}
    for precision in ("float32", "tf32"):
        out = tmp_path / precision
        more = ["--precision", precision, "--hidden", "20", "--train.steps_per_epoch", "2", "--out", str(out)]
        done = emulated_ranks(2, *command(small_npz, *more), EMULATOR_DEVICES="2", COLUMNS="200")
        assert (done.code, done.err) == (0, "")
        assert ("with products in tf32" in done.out) == (precision == "tf32")
        summary = json.loads((out / "summary.json").read_text())
        losses[precision] = summary["metrics"]["loss"]
    assert losses["tf32"] != losses["float32"]
    assert losses["tf32"] == pytest.approx(losses["float32"], rel=1e-2)


@pytest.mark.long
def test_products_by_cublaslt(small_npz, tmp_path):
    """A whole training with every product by the stand-in: float32's numbers."""
    losses = {}
    for provider in ("dptrain", "cublaslt"):
        out = tmp_path / provider
        more = ["--gemm", provider, "--hidden", "20", "--train.steps_per_epoch", "2", "--out", str(out)]
        done = emulated_ranks(0, *command(small_npz, *more), PYTHONPATH=f"{ROOT}:{STANDINS}", COLUMNS="200")
        assert (done.code, done.err) == (0, "")
        assert ("products by cublaslt" in done.out) == (provider == "cublaslt")
        losses[provider] = json.loads((out / "summary.json").read_text())["metrics"]["loss"]
    assert losses["cublaslt"] == pytest.approx(losses["dptrain"], rel=1e-5)


@pytest.mark.long
def test_products_by_whoever_was_faster(small_npz, tmp_path):
    """All ranks take rank 0's choice, and a training that goes on takes it again, whatever is measured meanwhile."""
    options = {"PYTHONPATH": f"{ROOT}:{STANDINS}", "EMULATOR_DEVICES": "2", "DPTRAIN_CACHE": str(tmp_path / "cache")}
    chosen = {}
    for name, more in (("first", []), ("resumed", ["--epochs", "2", "--resume", str(tmp_path / "first")])):
        out = tmp_path / name
        own = ["--gemm", "auto", "--hidden", "20", "--train.steps_per_epoch", "2", "--out", str(out), *more]
        done = emulated_ranks(2, *command(small_npz, *own), **options)
        assert done.code == 0, done.err
        assert len(done.messages) == 1, "rank 0 says what it chooses"
        summary = json.loads((out / "summary.json").read_text())
        chosen[name] = summary["kernels"]["chosen"]
        (kept,) = (tmp_path / "cache" / "products").iterdir()
        turned = {
            problem: {library: 2.0 if library == slower else 1.0 for library in ("dptrain", "cublaslt")}
            for problem, slower in chosen["first"].items()
        }
        kept.write_text(json.dumps(turned))  # by which the other one would be chosen each time
    assert len(chosen["first"]) >= 3
    assert {problem: chosen["resumed"][problem] for problem in chosen["first"]} == chosen["first"]


def test_a_rank_in_another_precision_is_refused(tmp_path):
    """Through the API, where every rank has a `compile` of its own."""
    script = tmp_path / "script.py"
    script.write_text(DIFFERENT)
    done = emulated_ranks(2, str(script), EMULATOR_DEVICES="2", cwd=tmp_path)
    assert done.code == 2
    assert "the ranks would compute different bits" in done.err
    assert "products by dptrain in tf32" in done.err


@pytest.mark.parametrize(
    ("ranks", "device", "more"), [(0, "cpu", ["--precision", "tf32"]), (2, "auto", ["--gemm", "cublaslt"])]
)
def test_without_a_gpu_its_products_are_refused(small_npz, tmp_path, ranks, device, more):
    arguments = ["-m", "dptrain", "--data", str(small_npz), "--device", device, *more]
    refused = emulated_ranks(ranks, *arguments, CUDA_VISIBLE_DEVICES="", cwd=tmp_path)
    assert refused.code == 2
    (message,) = refused.messages
    assert f"{more[0][2:]} = '{more[1]}' needs a GPU, but this is the CPU" in message


@pytest.mark.long
def test_within_a_mask_that_stands(small_npz, tmp_path):
    options = {"EMULATOR_DEVICES": "3", "COLUMNS": "150"}
    alone = emulated_ranks(0, *quick(small_npz), CUDA_VISIBLE_DEVICES="2", cwd=tmp_path, **options)
    together = emulated_ranks(2, *quick(small_npz), CUDA_VISIBLE_DEVICES="1,2", cwd=tmp_path, **options)
    assert (alone.code, together.code) == (0, 0), alone.err + together.err
    assert "32.0 GiB" in next(row for row in together.out.splitlines() if "Emulated GPU" in row)
    uuids = [
        [row.split("GPU-")[1][:36] for row in done.out.splitlines() if "Emulated GPU" in row]
        for done in (alone, together)
    ]
    assert len(set(uuids[1])) == 2
    assert uuids[1][1] == uuids[0][0]


@pytest.mark.long
def test_more_ranks_than_gpus(small_npz, tmp_path):
    """Without a mask: test_doctor.py, which asks the same."""
    within = emulated_ranks(2, *quick(small_npz), EMULATOR_DEVICES="2", CUDA_VISIBLE_DEVICES="1", cwd=tmp_path)
    assert within.code == 69
    (message,) = within.messages
    assert ": 2 ranks, 1 GPU (CUDA_VISIBLE_DEVICES=1); use -n 1, --share-gpu" in message
    shared = emulated_ranks(3, *quick(small_npz, "--share-gpu"), EMULATOR_DEVICES="2", cwd=tmp_path)
    assert (shared.code, shared.err) == (0, "")


def test_auto_takes_the_gpu_where_one_answers(small_npz, tmp_path):
    arguments = ["-m", "dptrain", "--data", str(small_npz), "--hidden", "20", "--fast-dev-run"]
    done = emulated_ranks(0, *arguments, COLUMNS="200", cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert "Emulated GPU" in done.out
    hidden = emulated_ranks(2, *arguments, COLUMNS="200", CUDA_VISIBLE_DEVICES="", cwd=tmp_path)
    assert (hidden.code, hidden.err) == (0, "")
    assert "CPU, " in hidden.out
    assert "no usable GPU" in hidden.out


def test_no_gpu_and_too_little_memory(small_npz, tmp_path):
    hidden = emulated_ranks(0, *command(small_npz), CUDA_VISIBLE_DEVICES="", cwd=tmp_path)
    assert hidden.code == 69
    assert len(hidden.messages) == 1
    assert "no usable GPU (CUDA_VISIBLE_DEVICES=)" in hidden.err
    # Alone: test_devices.py, test_a_model_that_cannot_fit.
    full = emulated_ranks(2, *command(small_npz), EMULATOR_DEVICES="2", EMULATOR_MEMORY="1M", cwd=tmp_path)
    assert full.code == 69
    assert "CUDA out of memory on Emulated GPU" in full.err
    assert "of 1.0 MiB are free" in full.err


def test_without_pycuda(small_npz, tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['pycuda'] = None")
    path = f"{tmp_path}:{ROOT}"
    done = dptrain(0, *command(small_npz)[2:], cwd=tmp_path, PYTHONPATH=path)
    assert done.code == 69
    assert done.messages == [
        "dptrain: --device cuda: PyCUDA is not installed: pip install 'pycuda>=2026.1', or use --device cpu"
    ]
