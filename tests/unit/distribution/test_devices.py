"""Each rank has a device; the launcher says how many ranks there are."""

import pytest

from dptrain import mixed_precision
from dptrain.distribution import devices, get_device_count, initialize, list_devices
from dptrain.distribution.devices import _sees_gpu
from dptrain.errors import ConfigError


def test_one_device_a_rank(be):
    assert list_devices() == ["cpu:0"]
    be(2, 3)
    assert list_devices() == list_devices("CPU") == ["cpu:0", "cpu:1", "cpu:2"]
    assert list_devices("gpu") == list_devices("tpu") == []
    assert (get_device_count(), get_device_count("gpu")) == (3, 0)
    with pytest.raises(ConfigError, match=r"^device_type = 'xpu': expected 'cpu', 'gpu' or 'tpu'$"):
        list_devices("xpu")


def test_a_rank_that_sees_a_gpu_and_can_use_it(be, monkeypatch):
    be(0, 2)
    monkeypatch.setattr(devices, "_sees_gpu", lambda: True)
    monkeypatch.setattr(devices, "tries_gpu", lambda device, dtype: dtype != "float64")
    assert list_devices() == list_devices("gpu") == ["gpu:0", "gpu:1"]
    assert list_devices("cpu") == ["cpu:0", "cpu:1"]
    monkeypatch.setattr(mixed_precision, "_global", mixed_precision.DTypePolicy("float64"))
    assert list_devices() == ["cpu:0", "cpu:1"]


def test_a_driver_without_a_gpu_and_a_gpu(monkeypatch):
    for has_driver, gpus, sees in ((False, ["GPU-1"], False), (True, [], False), (True, ["GPU-1"], True)):
        monkeypatch.setattr(devices, "has_driver", lambda driver_found=has_driver: driver_found)
        monkeypatch.setattr(devices, "visible_gpus", lambda gpus_found=gpus: gpus_found)
        assert _sees_gpu.__wrapped__() == sees


def under_mpirun(monkeypatch, rank: int, size: int) -> None:
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", str(size))


@pytest.mark.parametrize(
    "arguments",
    [(), (None, 2), (None, None, 1), ("a:1,b:2", 2, 1), ("a:1", 2, 1), ("a:1,b:2",)],
)
def test_the_job_that_mpirun_has_started(monkeypatch, arguments):
    under_mpirun(monkeypatch, 1, 2)
    initialize(*arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((None, 3), "num_processes = 3, but MPICH has started 2; use mpirun -n 3 python script.py"),
        ((None, 1), "num_processes = 1, but MPICH has started 2; use mpirun -n 1 python script.py"),
        (("a,b,c",), "num_processes = 3, but MPICH has started 2; use mpirun -n 3 python script.py"),
        ((None, 2, 0), "process_id = 0, but this process is rank 1 of 2; leave process_id out"),
        ((None, 0), "num_processes = 0: expected an integer >= 1"),
        (("a,b", 3), "The provided job_addresses ['a', 'b'] has 2 jobs, but num_processes is 3"),
    ],
)
def test_another_job_than_mpirun_has_started(monkeypatch, arguments, message):
    under_mpirun(monkeypatch, 1, 2)
    with pytest.raises(ConfigError) as caught:
        initialize(*arguments)
    assert str(caught.value) == message


def test_without_a_launcher_there_is_one_process():
    initialize()
    initialize("localhost:1234", 1, 0)
    for arguments in ((None, 2), ("a,b",)):
        with pytest.raises(ConfigError, match=r"no launcher has started this process; use mpirun -n 2 python"):
            initialize(*arguments)


def test_the_environment_stands_for_arguments_that_are_not_given(monkeypatch):
    under_mpirun(monkeypatch, 0, 2)
    for name, text in (("JOB_ADDRESSES", "a,b"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"KERAS_DISTRIBUTION_{name}", text)
    initialize()
    monkeypatch.setenv("KERAS_DISTRIBUTION_PROCESS_ID", "1")
    with pytest.raises(ConfigError, match="process_id = 1, but this process is rank 0 of 2"):
        initialize()
    initialize(process_id=0)
    monkeypatch.setenv("KERAS_DISTRIBUTION_NUM_PROCESSES", "two")
    with pytest.raises(ConfigError, match=r"^KERAS_DISTRIBUTION_NUM_PROCESSES = 'two': expected an integer$"):
        initialize()
