"""Messages along two axes of a mesh, captured: which wait for which, and the priority of their streams.

Prints, on rank 0, each message's axis in the order of its nodes, then the axes that a message waits for.
"""

import ctypes

import numpy as np

from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.backend.cuda.gpu.driver import call, driver
from dptrain.backend.cuda.transfers.links import LinkedSum
from dptrain.comm.mesh import MeshCommunicator

_HOST = 3  # CU_GRAPH_NODE_TYPE_HOST: the stand-in's collective
ranks = MeshCommunicator(comm.current(), {"batch": 2, "model": 2})
backend = CudaBackend()
backend.transport = "nccl"
links = backend.links(ranks)
axes = ("batch", "model", "batch")
messages = [LinkedSum(backend, backend.zeros((8,)), "sum", links.along(axis)) for axis in axes]

graph, stream = ctypes.c_void_p(), ctypes.c_void_p(backend.stream.handle)
call("cuStreamBeginCapture_v2", stream, 2)
for message in messages:
    message.begin()
for message in messages:
    message.finish()
call("cuStreamEndCapture", stream, ctypes.byref(graph))


def handles(name, arrays):
    """Return what the driver lists of a graph."""
    count = ctypes.c_size_t()
    call(name, graph, *[None] * arrays, ctypes.byref(count))
    lists = [(ctypes.c_void_p * count.value)() for _ in range(arrays)]
    call(name, graph, *lists, ctypes.byref(count))
    return [list(values) for values in lists]


(nodes,), (sources, targets) = handles("cuGraphGetNodes", 1), handles("cuGraphGetEdges", 2)
before = {node: {source for source, target in zip(sources, targets, strict=True) if target == node} for node in nodes}


def is_message(node):
    kind = ctypes.c_int()
    call("cuGraphNodeGetType", ctypes.c_void_p(node), ctypes.byref(kind))
    return kind.value == _HOST


def ancestors(node):
    earlier, pending = set(), [node]
    while pending:
        new = before[pending.pop()] - earlier
        earlier |= new
        pending += new
    return earlier


collectives = [node for node in nodes if is_message(node)]
assert len(collectives) == len(axes), "a node each, in the order of the calls"
waits = [[axes[collectives.index(other)] for other in ancestors(node) if other in collectives] for node in collectives]
assert waits == [[], [], ["batch"]], waits
streams = [backend.streams.linked(axis) for axis in ("batch", "model")]
assert streams[0].handle != streams[1].handle
least, greatest = ctypes.c_int(), ctypes.c_int()
call("cuCtxGetStreamPriorityRange", ctypes.byref(least), ctypes.byref(greatest))
assert [stream.priority for stream in streams] == [greatest.value] * 2
ordinary = ctypes.c_int()
call("cuStreamGetPriority", ctypes.c_void_p(backend.stream.handle), ctypes.byref(ordinary))
assert greatest.value < ordinary.value
driver().cuGraphDestroy(graph)
np.testing.assert_array_equal(backend.download(backend.zeros((1,))), [0])
print("apart\n", end="", flush=True)
