"""Random programs with sharded variables on the GPUs of ranks, compared with NumPy in float64.

Arguments: how messages travel; seeds, of which those are executed whose mesh has as many ranks as there are.
"""

import math
import pickle
import sys

from dptrain import comm
from dptrain.backend.cuda.backend import CudaBackend
from dptrain.comm.mesh import MeshCommunicator
from tests.programs.check import expected
from tests.programs.draw import program
from tests.programs.meshes import run_on_mesh

world, backend = comm.current(), CudaBackend()
backend.transport = sys.argv[1]


def together(work, **lengths):
    """Return what all ranks end with, which only these processes have written."""
    ranks = MeshCommunicator(world, lengths)
    try:
        return [pickle.loads(content) for content in world.allgather_bytes(pickle.dumps(work(ranks)))]
    finally:
        backend.part(ranks)


def make(program, values, **place):
    return backend.executable(program, dict(values), **place)


executed = 0
for seed in map(int, sys.argv[2:]):
    case = program(seed, "mesh")
    if math.prod(case.mesh.values()) != world.size:
        continue
    problem = expected(case).wrong(run_on_mesh(case, make, together=together))
    assert not problem, f"seed {seed}: {problem}\n{case}"
    executed += 1
if world.rank == 0:
    print(executed)
