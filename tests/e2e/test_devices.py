"""Ranks and GPUs that a launcher has masked in its own ways, on the emulated driver."""

import re
from pathlib import Path

import pytest

from tests.emulated import emulated_ranks, inside_emulator
from tests.launching import Finished
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")


def masked(masks: list[str], folder: Path, *arguments: str, **options: str) -> Finished:
    """Run dptrain with a CUDA_VISIBLE_DEVICES for each rank, as Slurm and Kubernetes set it."""
    cases = "\n".join(f"{rank}) export CUDA_VISIBLE_DEVICES='{mask}';;" for rank, mask in enumerate(masks))
    wrapper = folder / "wrapper.sh"
    wrapper.write_text(f'case "${{PMI_RANK:-$OMPI_COMM_WORLD_RANK}}" in\n{cases}\nesac\nexec "$@"\n')
    command = ["-m", "dptrain", "--fast-dev-run", "--hidden", "20", *arguments]
    options |= {"EMULATOR_DEVICES": "3", "COLUMNS": "150"}
    return emulated_ranks(len(masks), *command, cwd=folder, through=["sh", str(wrapper)], **options)


def uuids(done: Finished) -> list[str]:
    assert (done.code, done.err) == (0, "")
    return re.findall(r"GPU-[0-9a-f-]{36}", done.out)


@pytest.mark.long
def test_a_launcher_that_shows_each_rank_its_own_gpu(small_npz, tmp_path):
    used = uuids(masked(["2", "0"], tmp_path, "--data", str(small_npz), "--device", "auto"))
    all_three = uuids(masked(["0,1,2", "0,1,2", "0,1,2"], tmp_path, "--data", str(small_npz), "--device", "cuda"))
    assert len(set(all_three)) == 3
    assert used == [all_three[2], all_three[0]]


@pytest.mark.long
def test_a_launcher_that_shows_two_ranks_the_same_gpu(small_npz, tmp_path):
    arguments = ["--data", str(small_npz), "--device", "cuda"]
    refused = masked(["1", "0", "1"], tmp_path, *arguments)
    assert refused.code == 69
    (message,) = refused.messages
    assert re.search(r"host \S+: ranks 0 and 2 would both use GPU-[0-9a-f-]{36}, .*or use --share-gpu", message)
    assert len(uuids(masked(["1", "0", "1"], tmp_path, *arguments, "--share-gpu"))) == 3


@pytest.mark.parametrize("hidden", sample([0, 1], 2))
def test_a_gpu_on_some_ranks_only(small_npz, tmp_path, hidden):
    masks = ["", "1"] if hidden == 0 else ["1", ""]
    refused = masked(masks, tmp_path, "--data", str(small_npz), "--device", "auto")
    assert refused.code == 69
    (message,) = refused.messages
    assert message.startswith("dptrain: some ranks have a GPU and others do not: rank 0 (host ")
    assert re.search(rf"rank {hidden} \(host \S+\): CPU, .*no usable GPU \(CUDA_VISIBLE_DEVICES=\)", message)
    assert re.search(rf"rank {1 - hidden} \(host \S+\): cuda, float32, sm_90", message)
    alone = masked(masks, tmp_path, "--data", str(small_npz), "--device", "cuda")
    assert alone.code == 69
    assert len(alone.messages) == 1
    assert f"(rank {hidden}, host " in alone.messages[0]


SCRIPT = """
import os
import numpy as np, dptrain as dp
model = dp.Sequential([dp.layers.Dense(3, activation="softmax", input_shape=(4,))])
model.compile("sgd", "sparse_categorical_crossentropy", device="cuda", gpu_select="SELECT")
model.fit(np.ones((8, 4), np.float32), np.zeros(8, np.int64), verbose=0)
import pycuda.driver as cuda
from dptrain.comm import current
mask, gpu = os.environ.get("CUDA_VISIBLE_DEVICES"), model._backend.gpu
saw = current().allgather([mask, cuda.Device.count(), gpu])
if current().rank == 0:
    print("saw", saw)
"""


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("select", "mask", "seen"),
    sample(
        [
            ("mask", None, [["0", 1], ["1", 1]]),
            ("index", None, [[None, 3], [None, 3]]),
            ("mask", "2,0", [["2", 1], ["0", 1]]),
            ("index", "2,0", [["2,0", 2], ["2,0", 2]]),
        ],
        3,
    ),
)
def test_selecting_by_mask_and_by_index(tmp_path, monkeypatch, select, mask, seen):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "script.py").write_text(SCRIPT.replace("SELECT", select))
    options = {} if mask is None else {"CUDA_VISIBLE_DEVICES": mask}
    done = emulated_ranks(2, str(tmp_path / "script.py"), EMULATOR_DEVICES="3", **options)
    assert (done.code, done.err) == (0, "")
    devices = eval(done.out.splitlines()[0].removeprefix("saw "))
    assert [device[:2] for device in devices] == seen
    assert devices[0][2] != devices[1][2]


def slices(count: int) -> list[str]:
    """Return the UUIDs of the emulator's MIG slices."""
    code = "from dptrain.backend.cuda.gpu.selection import visible_gpus; print(*visible_gpus())"
    options = {"EMULATOR_MIG": "1", "EMULATOR_DEVICES": str(count)}
    printed = [emulated_ranks(0, "-c", code, CUDA_VISIBLE_DEVICES=str(n), **options).out for n in range(count)]
    return [text.strip() for text in printed]


@pytest.mark.long
def test_ranks_on_slices_of_one_gpu(small_npz, tmp_path):
    one, two, three = parts = slices(3)
    assert all(re.fullmatch(r"MIG-[0-9a-f-]{36}", slice_) for slice_ in parts)
    assert len(set(parts)) == 3
    arguments = ["--data", str(small_npz), "--device", "cuda"]
    for masks in ([f"{three}, {one}"] * 2, [three, one]):
        done = masked(masks, tmp_path, *arguments, EMULATOR_MIG="1")
        assert (done.code, done.err) == (0, "")
        assert re.findall(r"MIG-[0-9a-f-]{36}", done.out) == [three, one]
    refused = masked([two, two], tmp_path, *arguments, EMULATOR_MIG="1")
    assert refused.code == 69
    assert f"2 ranks, 1 GPU (CUDA_VISIBLE_DEVICES={two})" in refused.messages[0]
    unknown = masked([f"{one},MIG-none"] * 2, tmp_path, *arguments, EMULATOR_MIG="1")
    assert unknown.code == 69
    assert "no usable GPU" in unknown.messages[0]


@pytest.mark.long
def test_a_gpu_selected_by_index_on_the_command_line(small_npz, tmp_path):
    arguments = ["--data", str(small_npz), "--device", "cuda", "--gpu-select", "index"]
    assert len(set(uuids(masked(["0,1,2", "0,1,2"], tmp_path, *arguments)))) == 2


@pytest.mark.long
@pytest.mark.parametrize("ranks", [0, 2])
def test_out_of_memory_names_a_batch_that_fits(small_npz, tmp_path, ranks):
    """Following the advice leads to a training, once the data set and the ops' scratch have been met as well."""
    batch, tried = 1000, []
    for _ in range(5):
        arguments = ["--data", str(small_npz), "--device", "cuda", "--epochs", "1", "--batch-size", str(batch)]
        arguments += ["--train.steps_per_epoch", "1"]
        memory = {"EMULATOR_MEMORY": "5M" if ranks == 0 else "4M", "EMULATOR_DEVICES": "2"}
        done = emulated_ranks(ranks, "-m", "dptrain", *arguments, cwd=tmp_path, **memory)
        if done.code == 0:
            break
        assert done.code == 69
        message = done.messages[0]
        assert ranks == 0 or message.startswith("dptrain: rank ")
        ended = re.search(
            r"CUDA out of memory on Emulated GPU [^:]*: tried to allocate \S+ [MK]iB \([a-z].*\), \S+ \S+ of \S+ MiB "
            r"are free; largest buffers: .*(variables|samples|intermediate results) \S+ [MK]iB.*a batch of about (\d+) "
            r"rows per rank",
            message,
        )
        assert ended, message
        batch = int(ended[2]) * max(ranks, 1)
        tried.append(batch)
    assert tried, "5 MiB are too little for a batch of 1000"
    assert done.code == 0, done.err


def test_a_model_that_cannot_fit(small_npz, tmp_path):
    done = emulated_ranks(
        0, "-m", "dptrain", "--data", str(small_npz), "--device", "cuda", EMULATOR_MEMORY="1M", cwd=tmp_path
    )
    assert done.code == 69
    assert "(variables), " in done.messages[0]
    assert done.messages[0].endswith("the model alone takes 1.2 MiB: make it smaller")
