"""Messages that GPUs send each other: what ends a training there, and what is refused; with NCCL's stand-in."""

import importlib.util
import re

import pytest

from tests.conftest import ROOT
from tests.emulated import emulated, emulated_ranks, inside_emulator
from tests.launching import Finished
from tests.sample import sample

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")
SCRIPT = str(ROOT / "tests" / "e2e" / "scripts" / "links_in_trouble.py")
PATH = f"{ROOT}:{ROOT / 'tests' / 'standins'}"


STALL = {"DPTRAIN_STALL_TIMEOUT": "4"}


def train(folder, way: str, transport: str = "nccl", stages: int = 1, **environment: str) -> Finished:
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_LEAKS": "off", "PYTHONPATH": PATH, "TMPDIR": str(folder)}
    return emulated_ranks(2, SCRIPT, way, transport, str(stages), timeout=60, fresh=True, **options | environment)


@pytest.mark.parametrize(
    ("way", "code", "message", "environment"),
    sample(
        [
            ("raises", 70, "training, epoch 1, step 3: RuntimeError: bomb", {}),
            ("stopped", 77, "has been stopped for .* while rank 0 waits in", STALL),
            ("late", 77, "has not arrived for .* while rank 0 waits in messages between GPUs", STALL),
            ("none", 77, r"NCCL: RemoteError \(remote process exited", {"NCCL_STANDIN_FAULT": "1:5"}),
        ],
        2,
    ),
)
def test_a_rank_in_trouble_ends_the_job_in_one_line_that_names_it(tmp_path, way, code, message, environment):
    finished = train(tmp_path, way, **environment)
    assert finished.code == code, finished.err
    assert len(finished.messages) == 1
    assert re.search(f"^dptrain: rank 1/2 .*{message}", finished.messages[0])


@pytest.mark.sample(2)
@pytest.mark.parametrize("stages", [1, 2])
def test_a_killed_rank_ends_the_job(tmp_path, stages):
    killed = train(tmp_path, "killed", stages=stages)
    assert killed.code != 0
    assert "trained" not in killed.out


def test_a_stage_that_does_not_come_is_named(tmp_path):
    late = train(tmp_path, "late", stages=2, **STALL)
    assert late.code == 77, late.err
    assert len(late.messages) == 1
    assert re.search(
        "^dptrain: rank 1/2 .*has not arrived for .* while rank 0 waits in a send or receive", late.messages[0]
    )


REFUSED = """
import numpy as np, dptrain as dp, sys
model = dp.Sequential([dp.layers.Dense(2, input_shape=(3,))])
model.compile("sgd", "mse", comm=sys.argv[3], device=sys.argv[1], share_gpu=sys.argv[2] != "alone")
model.fit(np.zeros((8, 3), np.float32), np.zeros((8, 2), np.float32), verbose=0)
"""


@pytest.mark.parametrize(
    ("device", "shared", "transport", "code", "message"),
    [
        ("cpu", "alone", "nccl", 2, "--comm nccl needs --device cuda: this rank computes on "),
        ("cuda", "alone", "nccl", 69, "--comm nccl: nccl4py is not installed (No module named 'nccl'); pip install "),
        ("cuda", "shared", "nccl", 69, "--comm nccl: ranks 0-1 share the GPU GPU-"),
        ("cuda", "mig", "nccl", 69, "--comm nccl: a rank's GPU is a MIG slice, which NCCL does not support"),
    ],
)
def test_what_cannot_be_joined_is_refused_in_one_line(device, shared, transport, code, message):
    if importlib.util.find_spec("nccl") is not None:
        pytest.skip("nccl4py is installed")
    options = {"EMULATOR_DEVICES": "1" if shared == "shared" else "2", "EMULATOR_MIG": str(int(shared == "mig"))}
    finished = emulated_ranks(2, "-c", REFUSED, device, shared, transport, EMULATOR_LEAKS="off", **options)
    assert finished.code == code
    assert message in finished.err
    assert finished.err.count("dptrain.errors.AgreedError: ") == 1


@pytest.mark.slow
@pytest.mark.long
def test_auto_takes_nccl_where_it_is_there_on_every_rank(tmp_path):
    """Without NCCL the messages go through the host, as this MPI does not know GPUs; nothing is measured."""

    def message_of(way: str = "none", **environment: str) -> str:
        finished = train(tmp_path, way, "auto", **environment)
        assert (finished.code, "".join(finished.out.split())) == (0, 2 * "trained"), finished.err
        (line,) = finished.messages
        return line

    assert message_of() == "dptrain: --comm auto: nccl"
    without = "; not cuda-aware: this MPI library does not report CUDA support ("
    shared = message_of("share", EMULATOR_DEVICES="1")
    assert re.match(r"dptrain: --comm auto: host; not nccl: ranks 0-1 share the GPU GPU-\S+, which ", shared)
    assert without in shared
    slices = message_of("share", EMULATOR_MIG="1")
    assert slices.startswith(
        "dptrain: --comm auto: host; not nccl: a rank's GPU is a MIG slice, which NCCL does not support"
    )
    assert without in slices


MISUSED = """
import sys, numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from nccl.core import Communicator, NcclInvalid, NcclRedOp, get_unique_id
backend = CudaBackend()
comm = Communicator.init(1, 0, get_unique_id())
stream, flat = backend.stream.handle, backend.zeros((8,))
wrong = {
    "stream": lambda: comm.allreduce(flat, flat, NcclRedOp.SUM),
    "host": lambda: comm.allreduce(np.zeros(8, np.float32), flat, NcclRedOp.SUM, stream=stream),
    "type": lambda: comm.allreduce(flat, flat.view(np.int32), NcclRedOp.SUM, stream=stream),
    "count": lambda: comm.allgather(flat, flat[:4], stream=stream),
    "bounds": lambda: comm.send(type(flat)(flat._memory, flat.pointer + 16, (8,), flat.dtype), 0, stream=stream),
    "aborted": lambda: (comm.abort(), comm.allreduce(flat, flat, NcclRedOp.SUM, stream=stream)),
}
for name, call in wrong.items():
    try:
        call()
    except NcclInvalid as error:
        print(name, "-", error)
"""


def test_the_standin_notices_what_the_library_would_not_forgive(tmp_path):
    finished = emulated("python", "-c", MISUSED, PYTHONPATH=PATH, TMPDIR=str(tmp_path), EMULATOR_LEAKS="off")
    refusals = dict(line.split(" - ") for line in finished.out.splitlines())
    assert list(refusals) == ["stream", "host", "type", "count", "bounds", "aborted"], finished.err
    assert "out of bounds: 32 bytes" in refusals["bounds"]


DIFFER = """
from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
ranks, backend = comm.current(), CudaBackend()
backend.transport = "nccl"
link = backend.links(ranks).along("batch").link
flat = backend.zeros((8 + ranks.rank,))
link.all_reduce(flat, "sum", backend.stream)
backend.wait()
"""


# Rank 0 waits for its device; rank 1 has never queued what that waits for.
ABSENT = """
import os, time
from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.transfers.links import LinkedSum
from dptrain.runtime.failure import phase
ranks, backend = comm.current(), CudaBackend()
backend.transport = "nccl"
links, phase.name = backend.links(ranks), "training"
message = LinkedSum(backend, backend.zeros((8,)), "sum", links.along("batch"))
if ranks.rank:
    {does}
with links.queueing():
    message.begin()
    message.finish()
backend.wait()
"""


@pytest.mark.parametrize(
    ("does", "streams", "message"),
    sample(
        [
            ("time.sleep(60)", "inorder", "has not arrived for .* while rank 0 waits in messages between GPUs"),
            ("time.sleep(60)", "random", "has not arrived for .* while rank 0 waits in messages between GPUs"),
            ("os._exit(0)", "random", "left while rank 0 waits in messages between GPUs"),
            (
                "os.kill(os.getpid(), 19)",
                "random",
                "has been stopped for .* while rank 0 waits in messages between GPUs",
            ),
            (
                "ranks.barrier()",
                "random",
                "different methods: rank 0 in messages between GPUs .*, rank 1 in an all-gather ",
            ),
        ],
        2,
    ),
)
def test_a_gpu_that_waits_for_a_rank_in_vain(tmp_path, does, streams, message):
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_LEAKS": "off", "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    options |= {"EMULATOR_STREAMS": streams, **STALL}
    finished = emulated_ranks(2, "-c", ABSENT.format(does=does), fresh=True, timeout=60, **options)
    assert finished.code == 77, finished.err
    assert len(finished.messages) == 1
    assert re.search(message, finished.messages[0])


def test_ranks_in_other_calls_end_the_job(tmp_path):
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_LEAKS": "off", "PYTHONPATH": PATH, "TMPDIR": str(tmp_path)}
    finished = emulated_ranks(2, "-c", DIFFER, fresh=True, timeout=60, **options)
    assert finished.code == 77
    assert len(finished.messages) == 1
    assert re.search(
        r'NCCL: InvalidUsage \(call 1: rank . is in \["allreduce", [89], "float32", "SUM"\]', finished.messages[0]
    )
