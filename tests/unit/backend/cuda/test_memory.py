"""Memory of the GPU, of dropped models and of other threads; on the emulated driver."""

import sys

import pytest

from tests.emulated import emulated, inside_emulator

pytestmark = pytest.mark.skipif(inside_emulator(), reason="starts the emulator itself")

OPEN = """
import gc, threading
import numpy as np
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.errors import DeviceError
ops = CudaBackend()

class Model:
    def __init__(self, *buffers):
        self.buffers, self.itself = buffers, self  # a cycle, as layers and their model are one

def on_another_thread(function):
    caught = []
    def work():
        try:
            function()
        except BaseException as error:
            caught.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return caught
"""


def python(code: str, **options: str):
    return emulated(sys.executable, "-W", "error", "-c", OPEN + code, **options)


def test_memory_of_a_dropped_model_is_collected_before_it_is_missing():
    code = """
gc.disable()
for _ in range(3):
    model = Model(ops.empty((12 << 20,), np.uint8))
    del model
print(ops.empty((12 << 20,), np.uint8).nbytes)
"""
    process = python(code, EMULATOR_MEMORY="20M")
    assert (process.code, process.out, process.err) == (0, f"{12 << 20}\n", "")


def test_samples_find_the_room_of_a_dropped_model():
    code = """
from dptrain.batches.feed import ResidentFeed, make_feed
gc.disable()
model = Model(ops.empty((12 << 20,), np.uint8))
del model
with make_feed(ops, [np.zeros((12, 1 << 20), np.uint8)], 4) as feed:
    print(type(feed) is ResidentFeed)
"""
    process = python(code, EMULATOR_MEMORY="20M")
    assert (process.code, process.out, process.err) == (0, "True\n", "")


def test_what_another_thread_collects_is_freed_by_the_owner():
    code = """
import pycuda.driver as cuda
gc.disable()
before = cuda.mem_get_info()[0]
x = ops.zeros((100, 100))
model = Model(ops.empty((12 << 20,), np.uint8), ops.staging((1 << 20,), np.float32), ops.exchange(x))
del model
assert on_another_thread(gc.collect) == []
assert before - cuda.mem_get_info()[0] > 16 << 20
ops.write(x, np.ones((100, 100)))
print(before - cuda.mem_get_info()[0], ops.download(x).sum())
"""
    process = python(code)
    assert (process.code, process.out, process.err) == (0, "40000 10000.0\n", "")


def test_what_another_thread_collects_last_is_freed_at_the_end():
    process = python("model = Model(ops.zeros((9,)), ops)\ndel model, ops\nassert on_another_thread(gc.collect) == []")
    assert (process.code, process.err) == (0, "")


USES = {
    "a program": "program.run()",
    "an output": "program.outputs['sum']",
    "a variable": "variable.numpy()",
    "an allocation": "ops.empty((3,))",
    "pinned memory": "ops.staging((3,), np.float32)",
    "a download": "ops.download(x)",
    "an upload": "ops.upload(np.zeros(3))",
    "an exchange": "exchange.begin()",
    "a user's kernel": "ops.launch(double.kernel, [x, y], {})",
}


def test_another_thread_is_refused():
    code = f"""
import dptrain as dp
from dptrain.program.program import trace
from dptrain.program.tensor import Variable

@dp.ops.op(arguments="PPq", source='extern "C" __global__ void double(const float *x, float *y, long long n) {{}}')
def double(x, y):
    y[...] = 2 * x

x, y = ops.zeros((3, 3)), ops.zeros((3, 3))
variable = Variable(np.ones(3, np.float32))
program = trace(lambda x: {{"sum": dp.ops.sum(x * variable)}}, {{"x": ((3,), "float32")}})
program = ops.executable(program, {{"x": np.ones(3, np.float32)}})
program.run()
exchange = ops.exchange(x)
for name, use in {USES}.items():
    (error,) = on_another_thread(lambda: eval(use))
    assert type(error) is DeviceError, (name, repr(error))
print(error)
ops.write(x, np.full((3, 3), 2))
print(ops.download(x).sum())
"""
    code = code.replace("void double(", "void twice(").replace('arguments="PPq"', 'arguments="PPq", kernel="twice"')
    process = python(code)
    assert (process.code, process.err) == (0, "")
    message, total = process.out.splitlines()
    assert (
        message
        == "the GPU belongs to thread 'MainThread', which opened it: use it from there, not from 'Thread-9 (work)'"
    )
    assert total == "18.0"


def test_a_thread_that_trains_and_ends_leaves_the_gpu_to_the_next():
    code = """
import dptrain.backend.cuda.gpu.device as device
ops.close()
device._close_gpu()
kept = []

def train():
    ops = CudaBackend()
    kept.append((ops, ops.zeros((2,))))
    print(ops.download(kept[-1][1]).tolist())

for _ in range(3):
    assert on_another_thread(train) == []
train()
try:
    kept[0][0].write(kept[0][1], np.ones(2))
except DeviceError as error:
    print(error)
"""
    process = python(code)
    assert (process.code, process.err) == (0, "")
    assert process.out == (
        "[0.0, 0.0]\n" * 4 + "the GPU belonged to thread 'Thread-1 (work)', and was closed when that thread ended\n"
    )
