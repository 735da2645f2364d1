"""Shows the devices of a job, and a mesh of them.

distribution.py [NUM_PROCESSES] [PROCESS_ID]
"""

import sys

from dptrain import distribution
from dptrain.distribution.placing import current_mesh
from dptrain.utils import rank

distribution.initialize(None, *map(int, sys.argv[1:]))
mesh = distribution.DeviceMesh((2, 1), ["rows", "model"])
assert mesh.devices.ravel().tolist() == distribution.list_devices()
with distribution.ModelParallel(layout_map=distribution.LayoutMap(mesh)).scope():
    print(f"rank {rank()}: {distribution.list_devices('cpu')} {distribution.get_device_count()} {current_mesh()}")
