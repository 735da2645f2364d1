"""Which way messages take."""

import pytest

import dptrain as dp
from dptrain.backend import create
from dptrain.comm import SoloCommunicator
from dptrain.errors import ConfigError
from dptrain.train import transports


@pytest.mark.parametrize("wanted", ["host", "auto"])
def test_on_a_cpu_messages_go_through_the_host(wanted):
    backend = create("cpu", "float32", 1)
    transports.choose_transport(backend, SoloCommunicator(), wanted)
    assert backend.transport == "host"


def test_a_way_that_is_not_there_is_refused_in_one_line():
    model = dp.Sequential([dp.Input((3,)), dp.layers.Dense(2)])
    with pytest.raises(ConfigError, match=r"^comm = 'ipc': expected one of 'host', 'nccl', 'cuda-aware', 'auto'$"):
        model.compile("sgd", "mse", comm="ipc")


class Gpu:
    """A rank's backend, on a GPU of its own or on one that is shared."""

    name, gpu, description, transport = "cuda", "GPU-1", "a GPU", "host"


class Pair(SoloCommunicator):
    """Two ranks of which the other one knows what `others` says of its GPU and of NCCL."""

    def __init__(self, *others):
        super().__init__()
        self.size, self.others = 2, list(others)

    def allgather(self, fact, **_):
        return [fact, self.others.pop(0)]

    def why_not_cuda_aware(self):
        return "MPI knows no GPUs"


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (("GPU-2", ""), "nccl"),
        (("GPU-2", "nccl4py is not installed", ""), "host; not nccl: nccl4py is not installed; not cuda-aware: MPI "),
        (
            ("GPU-1", "", ""),
            "host; not nccl: ranks 0-1 share the GPU GPU-1, which NCCL does not support; not cuda-aware",
        ),
    ],
)
def test_auto_takes_the_best_way_that_every_rank_has(monkeypatch, capfd, others, said):
    monkeypatch.setattr(transports.nccl, "why_not", lambda: "")
    backend = Gpu()
    transports.choose_transport(backend, Pair(*others), "auto")
    assert backend.transport == said.partition(";")[0]
    assert capfd.readouterr().err.startswith(f"dptrain: --comm auto: {said}")
