"""CUDA graphs: work that is recorded once and launched often."""

import contextlib
import threading

import numpy as np
import pytest

from dptrain.backend.cuda.graphs import CudaGraph, capture
from dptrain.errors import DeviceError
from tests.ops.conftest import no_cuda

N = 64


@pytest.fixture(scope="module")
def cuda():
    """PyCUDA's driver, with the GPU's context current."""
    if reason := no_cuda():
        pytest.skip(reason)
    from dptrain.backend.cuda.gpu import device

    device.open_gpu(0, "index", "here")
    return device.cuda


@pytest.fixture(scope="module")
def scale(cuda):
    """A kernel that multiplies N numbers."""
    from pycuda.compiler import SourceModule

    module = SourceModule("__global__ void scale(float *x, float by) { x[threadIdx.x] *= by; }")
    yield module.get_function("scale")
    del module


@pytest.fixture
def streams(cuda):
    """Two streams that do not wait for the default stream."""
    return cuda.Stream(1), cuda.Stream(1)


@pytest.fixture
def ones(cuda):
    """N ones on the device."""
    memory = cuda.to_device(np.ones(N, np.float32))
    cuda.Context.synchronize()
    return memory


def multiply(scale, memory, by, stream):
    """Queue the kernel."""
    scale(memory, np.float32(by), block=(N, 1, 1), stream=stream)


def values(cuda, memory):
    """Return what the device holds."""
    return cuda.from_device(int(memory), (N,), np.float32)


def test_nothing_runs_until_the_graph_is_launched(cuda, scale, streams, ones):
    stream, other = streams
    source, out = cuda.pagelocked_zeros(N, np.float32), cuda.pagelocked_zeros(N, np.float32)
    with capture(stream) as graph:
        cuda.memcpy_htod_async(ones, source, stream)
        multiply(scale, ones, 2, stream)
        multiply(scale, ones, 3, stream)
        cuda.memcpy_dtoh_async(out, ones, stream)
    assert graph.nodes == 4
    np.testing.assert_array_equal(values(cuda, ones), 1)
    for number, on in enumerate((stream, other, stream), 1):
        source[:] = number
        graph.launch(on)
        on.synchronize()
        np.testing.assert_array_equal(out, 6 * number)
    graph.close()


def test_a_second_stream_is_recorded_between_two_events(cuda, scale, streams, ones):
    first, second = streams
    other_ones = cuda.to_device(np.ones(N, np.float32))
    fork, join = cuda.Event(), cuda.Event()
    with capture(first) as graph:
        multiply(scale, ones, 2, first)
        fork.record(first)
        second.wait_for_event(fork)
        cuda.memcpy_dtod_async(other_ones, ones, 4 * N, second)
        join.record(second)
        first.wait_for_event(join)
        multiply(scale, ones, 5, first)
    assert graph.nodes == 3
    for _ in range(2):
        graph.launch(first)
    first.synchronize()
    graph.close()
    np.testing.assert_array_equal(values(cuda, ones), 100)
    np.testing.assert_array_equal(values(cuda, other_ones), 20)


def test_launches_queue_behind_each_other_and_other_work(cuda, scale, streams, ones):
    stream, _ = streams
    with capture(stream) as graph:
        multiply(scale, ones, 2, stream)
    for _ in range(5):
        graph.launch(stream)
        cuda.memset_d32_async(ones, int(np.float32(3).view(np.int32)), N, stream)
    graph.launch(stream)
    graph.close()  # what is queued still runs
    stream.synchronize()
    np.testing.assert_array_equal(values(cuda, ones), 6)


def test_an_exception_of_the_block_passes_and_leaves_the_stream_as_it_was(cuda, scale, streams, ones):
    stream, _ = streams
    graphs = []

    def fail():
        with capture(stream) as graph:
            graphs.append(graph)
            multiply(scale, ones, 2, stream)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(DeviceError, match="before its capture ended"):
        graphs[0].launch(stream)
    with pytest.raises(cuda.LogicError, match="operation not permitted when stream is capturing"), capture(stream):
        stream.synchronize()
    multiply(scale, ones, 7, stream)
    stream.synchronize()
    np.testing.assert_array_equal(values(cuda, ones), 7)


def test_what_a_graph_cannot_hold_is_named_at_the_end(cuda, streams):
    stream, other = streams
    message = r"cuStreamEndCapture: operation failed due to a previous error during capture \(CUDA error 901\)"
    with pytest.raises(DeviceError, match=message), capture(stream), contextlib.suppress(cuda.LogicError):
        stream.synchronize()

    def fork():
        event = cuda.Event()
        with capture(stream):
            event.record(stream)
            other.wait_for_event(event)
            cuda.memset_d32_async(memory, 0, 1, other)

    memory = cuda.mem_alloc(4)
    with pytest.raises(DeviceError, match="cuStreamEndCapture: capturing stream has unjoined work"):
        fork()
    stream.synchronize()
    other.synchronize()


def test_a_stream_is_captured_once_at_a_time(cuda, scale, streams, ones):
    stream, _ = streams
    with capture(stream) as graph:
        multiply(scale, ones, 2, stream)
        with pytest.raises(DeviceError, match=r"^cuStreamBeginCapture_v2: .* present state"), capture(stream):
            pass
    graph.launch(stream)
    stream.synchronize()
    np.testing.assert_array_equal(values(cuda, ones), 2)
    graph.close()


def test_a_closed_graph_is_not_launched(streams):
    with capture(streams[0]) as graph:
        pass
    assert graph.nodes == 0
    graph.launch(streams[0])
    graph.close()
    graph.close()
    for dead in (graph, CudaGraph()):
        with pytest.raises(DeviceError, match="a CUDA graph was launched after it was closed"):
            dead.launch(streams[0])


def test_memory_may_come_and_go_and_other_threads_may_work_meanwhile(cuda, scale, streams, ones):
    stream, other = streams
    context = cuda.Context.get_current()
    results = []

    def feed():
        context.push()
        memory, host = cuda.mem_alloc(4 * N), cuda.pagelocked_zeros(N, np.float32)
        host[:] = 4
        cuda.memcpy_htod_async(memory, host, other)
        other.synchronize()
        results.append(values(cuda, memory))
        del memory, host
        context.pop()

    with capture(stream) as graph:
        thread = threading.Thread(target=feed)
        thread.start()
        thread.join()
        cuda.mem_alloc(4 * N).free()
        multiply(scale, ones, 2, stream)
    graph.launch(stream)
    stream.synchronize()
    graph.close()
    np.testing.assert_array_equal(results[0], 4)
    np.testing.assert_array_equal(values(cuda, ones), 2)


def test_another_thread_may_drop_the_last_reference(cuda, scale, streams, ones):
    stream, _ = streams
    with capture(stream) as graph:
        multiply(scale, ones, 2, stream)
    graph.launch(stream)
    holder = [graph]
    del graph
    thread = threading.Thread(target=holder.clear)  # on the emulator, a graph left behind would fail the run
    thread.start()
    thread.join()
    stream.synchronize()
    np.testing.assert_array_equal(values(cuda, ones), 2)
