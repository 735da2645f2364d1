"""Predicted times, by hand; each threshold from both sides."""

from dataclasses import replace

import pytest

from dptrain.backend.cuda.cost.roofline import (
    GPUS,
    GRAPH_SECONDS,
    NODE_SECONDS,
    Load,
    blocks_per_processor,
    fill,
    predict,
    predict_step,
)

A100, H100, H200 = GPUS
# A full GPU, whatever it is: 1,056 blocks of 256 threads fit on an H100.
FULL = Load("full", 1056, 256, 0, 32, 0, 0, 0, {})


def load(**changes):
    return replace(FULL, **changes)


def test_peaks_are_those_of_dense_matrices():
    assert [gpu.name for gpu in GPUS] == ["A100", "H100", "H200"]
    for gpu in GPUS:
        assert gpu.peaks["half"] == pytest.approx(2 * gpu.peaks["TF32"], rel=1e-3)
        assert 7 < gpu.peaks["TF32"] / gpu.peaks["FP32"] < 8.1
    assert H200.bandwidth > H100.bandwidth > A100.bandwidth > 2e12


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, 8),  # 2,048 threads
        ({"threads": 1024}, 2),
        ({"threads": 32}, 32),
        ({"registers": 33}, 6),  # 40 x 32 registers a warp: 65,536 // 10,240
        ({"registers": 255, "threads": 512}, 1),  # compiled for one block, which fits
        ({"shared": 27 * 1024}, 8),  # 228 KiB // 28 KiB
        ({"shared": 28 * 1024}, 7),
        ({"registers": None, "shared": None}, 8),
        ({"threads": 0, "shared": None, "registers": None}, 32),
    ],
)
def test_blocks_that_a_multiprocessor_holds(changes, blocks):
    assert blocks_per_processor(load(**changes), H100) == blocks


def test_an_a100_has_less_shared_memory():
    assert blocks_per_processor(load(shared=28 * 1024), A100) == 5


def test_how_much_of_a_gpu_is_filled():
    assert fill(load(blocks=132), H100) == 1 / 8
    assert fill(load(blocks=1055), H100) == 1055 / 1056
    assert fill(load(blocks=5000), H100) == 1
    assert fill(load(blocks=0, threads=0), H100) == 1, "a library fills it, as far as is known"


def test_memory_takes_the_time_from_a_launch_on():
    least = NODE_SECONDS * H100.bandwidth
    below, above = (predict(load(read=int(least * part), written=0), H100) for part in (0.99, 1.01))
    assert (below.bound, above.bound) == ("launch", "memory")
    assert above.seconds == pytest.approx(2.01 * NODE_SECONDS)
    prediction = predict(load(read=6_700_000, written=3_350_000), H100)
    assert (prediction.bound, prediction.seconds) == ("memory", pytest.approx(NODE_SECONDS + 3e-6))


def test_arithmetic_takes_the_time_where_it_is_slower_than_memory():
    for unit, peak in H100.peaks.items():
        for part, bound in ((0.99, "memory"), (1.01, unit)):
            prediction = predict(load(read=33_500_000, operations={unit: int(part * 1e-5 * peak)}), H100)
            assert (prediction.bound, prediction.seconds) == (bound, pytest.approx(NODE_SECONDS + max(part, 1) * 1e-5))


def test_units_of_one_kernel_take_turns():
    prediction = predict(load(operations={"FP32": 67_000_000_0, "TF32": 494_500_000_0 * 3}), H100)
    assert (prediction.bound, prediction.seconds) == ("TF32", pytest.approx(NODE_SECONDS + 4e-5))


def test_few_blocks_take_the_time_below_half_of_a_gpu():
    work = {"read": 33_500_000}
    for blocks, bound in ((527, "blocks"), (528, "memory")):
        prediction = predict(load(blocks=blocks, **work), H100)
        assert (prediction.bound, prediction.seconds) == (bound, pytest.approx(NODE_SECONDS + 1e-5 * 1056 / blocks))
    assert predict(load(blocks=1, read=1000), H100).bound == "launch", "little work needs no more blocks"


def test_a_step_has_its_share_of_a_graphs_launch():
    kernel = NODE_SECONDS + 1e-5
    for count, steps in ((8, 16), (16, 8), (17, 1)):
        seconds = predict_step(count * [load(read=33_500_000)], H100)
        assert seconds == pytest.approx(count * kernel + GRAPH_SECONDS / steps)
