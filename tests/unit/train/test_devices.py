"""Which rank takes which GPU, and what ranks on different devices are told."""

import sys
from typing import Any

import pytest

from dptrain import backend as backends
from dptrain.backend.cpu.backend import CpuBackend
from dptrain.backend.cuda.gpu import selection as gpus
from dptrain.comm import SoloCommunicator
from dptrain.errors import AgreedError, DeviceError, ExitCode
from dptrain.train.devices import check_devices, find_place, open_backend


@pytest.fixture(autouse=True)
def _no_mask(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("seen", "share", "expected"),
    [
        (["ab", "ab"], False, [0, 1]),
        (["abc", "abc"], False, [0, 1]),
        (["ab", "ab", "ab"], True, [0, 1, 0]),
        (["a", "b", "c"], False, [0, 0, 0]),
        (["ab", "abc"], False, [0, 1]),
        (["ab", "b", "ba"], True, [0, 0, 0]),
        (["", ""], False, [0, 0]),
        (["a", ""], False, [0, 0]),
        (["b", "ab", "abc"], False, [0, 0, 2]),
    ],
)
def test_every_rank_gets_a_gpu_that_it_sees(seen, share, expected):
    chosen = gpus.assign(seen, range(len(seen)), share, "h")
    assert chosen == expected
    taken = [of_rank[number] for of_rank, number in zip(seen, chosen, strict=True) if of_rank]
    assert share or len(set(taken)) == len(taken)


def test_two_ranks_on_one_gpu_are_refused():
    with pytest.raises(DeviceError, match=r"^host h: 4 ranks, 2 GPUs; use -n 2, --share-gpu or --device cpu$"):
        gpus.assign(["ab"] * 4, range(4), False, "h")
    with pytest.raises(DeviceError, match=r"^host h: ranks 4 and 6 would both use a, .*--share-gpu"):
        gpus.assign(["a", "b", "a"], [4, 5, 6], False, "h")


class Told(SoloCommunicator):
    """Rank 0 of several, whose others say what the test wants."""

    def __init__(self, *others: Any) -> None:
        super().__init__()
        self.others = others
        self.size = self.local_size = 1 + len(others)

    @property
    def host(self) -> str:
        return "a"

    def allgather(self, fact: Any) -> list[Any]:
        return [fact, *self.others]


def backend_on(gpu: str | None) -> CpuBackend:
    backend = CpuBackend()
    if gpu is not None:
        backend.name, backend.numerics, backend.gpu = "cuda", "cuda, float32, sm_90", gpu
    return backend


def test_ranks_of_other_nodes_do_not_count(monkeypatch):
    monkeypatch.setattr("dptrain.train.devices.visible_gpus", lambda: ["g0"])
    place = find_place(Told([1, ["g0"]]), "cuda", "float32", False)
    assert (place.gpu, place.trouble) == (0, None)
    place = find_place(Told([0, ["g0"]]), "cuda", "float32", False)
    assert place.trouble == "host a: 2 ranks, 1 GPU; use -n 1, --share-gpu or --device cpu"
    with pytest.raises(DeviceError, match="2 ranks, 1 GPU"):
        backends.create("cuda", "float32", 1, place=place)


def test_a_gpu_on_one_rank_only():
    comm = Told(["b", "numpy", "x", "CPU, 1 thread (no GPU: none answers)", None], ["c", "cuda", "sm", "G", "u2"])
    with pytest.raises(AgreedError) as caught:
        check_devices(comm, backend_on("u0"), False)
    assert caught.value.exit_code == ExitCode.DEVICE
    assert str(caught.value) == (
        "some ranks have a GPU and others do not: rank 0 (host a): cuda, float32, sm_90; rank 1 (host b): CPU, "
        "1 thread (no GPU: none answers); rank 2 (host c): sm; give every rank a GPU, or use --device cpu"
    )


def test_different_bits():
    numerics = backend_on(None).numerics
    rows = [["b", "cpu", "loops x", "", None], ["a", "cpu", numerics, "", None], ["b", "cpu", "loops x", "", None]]
    with pytest.raises(AgreedError) as caught:
        check_devices(Told(*rows), backend_on(None), False)
    assert caught.value.exit_code == ExitCode.CONFIG
    assert f"ranks 0, 2 (host a): {numerics}; ranks 1, 3 (host b): loops x; give all" in str(caught.value)


def test_two_containers_on_one_gpu():
    others = [["b", "cuda", "cuda, float32, sm_90", "G", gpu] for gpu in ("u1", "u0")]
    with pytest.raises(AgreedError, match=r"ranks 0, 2 use the same GPU u0 \(hosts a, b\).*--share-gpu") as caught:
        check_devices(Told(*others), backend_on("u0"), False)
    assert caught.value.exit_code == ExitCode.DEVICE
    check_devices(Told(*others), backend_on("u0"), True)
    check_devices(Told(*others), backend_on("u2"), False)


def test_a_driver_without_pycuda_is_said_aloud(monkeypatch):
    monkeypatch.setitem(sys.modules, "pycuda", None)
    monkeypatch.setattr(backends, "has_driver", lambda: True)
    description = open_backend(SoloCommunicator(), jit_compile=False).description
    assert "(an NVIDIA driver is installed, but not PyCUDA: pip install 'pycuda>=2026.1' to use the GPU)" in description
    for options in ({"device": "cpu"}, {"dtype": "float64"}):
        assert "NVIDIA" not in open_backend(SoloCommunicator(), jit_compile=False, **options).description
    monkeypatch.setattr(backends, "has_driver", lambda: False)
    assert "NVIDIA" not in open_backend(SoloCommunicator(), jit_compile=False).description
