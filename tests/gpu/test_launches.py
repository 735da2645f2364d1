"""What a step queues, from the emulated driver's trace: few kernels in one graph, and no copies."""

import collections
import json
import sys

import pytest

from tests.emulated import emulated, emulated_ranks, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")

# Trains 784-128-10 with Adam and accuracy for so many steps, by programs and by fit().
SCRIPT = """
import sys
import numpy as np
import dptrain as dp
from dptrain.train import health
health._SECONDS = float("inf")  # no copies of the state by the clock
steps = int(sys.argv[1])
rng = np.random.default_rng(0)
x, y = rng.integers(0, 256, (32 * steps, 784)).astype(np.uint8), rng.integers(0, 10, 32 * steps)
model = dp.Sequential([dp.layers.Rescaling(1 / 255, input_shape=(784,)), dp.layers.Dense(128, "relu"),
                       dp.layers.Dense(10, "softmax")], seed=1)
model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"], device="cuda", steps_per_execution=steps)
model.fit(x, y, batch_size=32, verbose=0)
"""


# Fits so many steps twice, on data of their own, and prints how many graphs were recorded; a callback may look at every
# batch.
FITTED = """
import sys
import numpy as np
import dptrain as dp
from dptrain.backend.cuda.gpu.device import Gpu
steps, watched = int(sys.argv[1]), sys.argv[2] == "watched"
captured, count = Gpu.captured, []
Gpu.captured = lambda *given: count.append(0) or captured(*given)
rng = np.random.default_rng(0)
model = dp.Sequential([dp.layers.Dense(6, "relu", input_shape=(5,)), dp.layers.Dense(3, "softmax")], seed=1)
model.compile("sgd", "sparse_categorical_crossentropy", device="cuda",
              steps_per_execution="auto" if watched else steps)
hooks = [dp.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)] if watched else []
for _ in range(2):
    x, y = rng.random((4 * steps, 5)), rng.integers(0, 3, 4 * steps)
    model.fit(x, y, batch_size=4, verbose=0, callbacks=hooks)
print(len(count), model.get_weights()[0].tobytes().hex())
"""


# Makes so many steps of so many runs, as a pack.
PACK = """
import sys
from dptrain.backend.cuda.backend import CudaBackend
from tests.ops.test_packs_on_cuda import Run
steps, runs = map(int, sys.argv[1:])
pack = [Run(CudaBackend(), seed) for seed in range(runs)]
for run in pack:
    run.backend.joins_packs = True
    run.ask(steps)
pack[0].backend.wait()
"""


# Computes a GroupNormalization of 8 x 8 pixels and 16 features in 4 groups, written in ops, and its gradients.
NORMALIZED = """
import sys
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from tests.ops.test_reductions_on_cuda import group_normalization
rows = int(sys.argv[1])
values = {name: np.ones((rows, 8, 8, 16), np.float32) for name in ("x", "target")}
CudaBackend().executable(group_normalization(rows), values).run()
"""


def events_of(tmp_path, *arguments, script=SCRIPT):
    """Return what the emulated driver did."""
    trace = tmp_path / f"trace{arguments}.json"
    finished = emulated(sys.executable, "-c", script, *map(str, arguments), EMULATOR_TRACE=str(trace))
    assert (finished.code, finished.err) == (0, "")
    return json.loads(trace.read_text())["traceEvents"]


def traced(tmp_path, *arguments, script=SCRIPT):
    """Return how often a training of so many steps does what, by category and name."""
    events = events_of(tmp_path, *arguments, script=script)
    return collections.Counter((event["cat"], event["name"]) for event in events)


def test_a_step_is_one_graph_of_at_most_eight_kernels(tmp_path):
    three_steps, ten_steps = traced(tmp_path, 3), traced(tmp_path, 10)
    seven_steps = ten_steps - three_steps
    assert three_steps - ten_steps == collections.Counter()
    kernels = {name: count for (category, name), count in seven_steps.items() if category == "kernel"}
    assert set(kernels.values()) == {7}, "every kernel runs once a step"
    assert len(kernels) <= 8
    assert seven_steps[("graph", "graph launch")] == 7
    assert {category for category, _ in seven_steps} == {"kernel", "graph"}, "no copies, no memsets, no allocations"


def graphs_of(tmp_path, *arguments):
    """Return what the fits printed, and the kernels of each graph that was launched."""
    trace = tmp_path / f"trace{arguments}.json"
    finished = emulated(sys.executable, "-c", FITTED, *map(str, arguments), EMULATOR_TRACE=str(trace))
    assert (finished.code, finished.err) == (0, "")
    events = json.loads(trace.read_text())["traceEvents"]
    return finished.out.split(), [event["args"]["kernels"] for event in events if event["cat"] == "graph"]


@pytest.mark.long
def test_sixteen_steps_are_one_graph_unless_a_callback_looks_at_each(tmp_path):
    (recorded, weights), single = graphs_of(tmp_path, 33, "watched")
    a_step = single[0]
    assert recorded == "1"
    assert single == 66 * [a_step]
    printed, together = graphs_of(tmp_path, 33, "alone")
    assert printed == ["2", weights], "the second fit records none, and the bits are the same"
    assert together == 2 * [16 * a_step, 16 * a_step, a_step]


@pytest.mark.long
def test_steps_in_which_ranks_meet_share_no_graph(tmp_path):
    script, trace = tmp_path / "fit.py", tmp_path / "trace.json"
    script.write_text(FITTED)
    options = {"EMULATOR_DEVICES": "2", "EMULATOR_TRACE": str(trace)}
    finished = emulated_ranks(2, str(script), "17", "alone", **options)
    assert (finished.code, finished.err) == (0, "")
    for rank in range(2):
        events = json.loads(trace.with_name(f"trace.json.rank{rank}").read_text())["traceEvents"]
        kernels = [event["args"]["kernels"] for event in events if event["cat"] == "graph"]
        assert kernels == kernels[: len(kernels) // 34] * 34, "each of 34 steps launches the same graphs"
        assert max(kernels) <= 8


@pytest.mark.long
def test_launches_of_a_step_do_not_depend_on_the_number_of_runs(tmp_path):
    alone, pack = (traced(tmp_path, 9, runs, script=PACK) - traced(tmp_path, 2, runs, script=PACK) for runs in (1, 16))
    assert alone == pack
    assert alone[("graph", "graph launch")] == 7
    assert {category for category, _ in alone} == {"kernel", "graph"}


@pytest.mark.sample(2)
@pytest.mark.parametrize("rows", [1, 32])
def test_sums_over_several_axes_have_a_block_for_eight_results(tmp_path, rows):
    events = events_of(tmp_path, rows, script=NORMALIZED)
    kernels = [event for event in events if event["cat"] == "kernel"]
    sums = [event["args"] for event in kernels if event["name"].startswith("run_rows")]
    assert len(kernels) == 4
    # A warp sums each of four groups of each sample, 8 x 8 x 4 terms, forward and backward in one launch.
    assert [(kernel["grid"], kernel["block"]) for kernel in sums] == [([-(-4 * rows // 8), 1, 1], [256, 1, 1])]
