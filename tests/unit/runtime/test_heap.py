"""What the C library keeps of memory that was freed."""

import platform
import subprocess
import sys

import pytest

CODE = """
import numpy as np
from pathlib import Path
from dptrain.runtime import heap

def mb():
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) // 1000 for line in lines if line.startswith("VmRSS"))

np.ones(8 << 20, np.uint8)  # is freed: arrays of the size lie in the heap from now on
both = [(np.ones(4 << 20, np.uint8), np.ones(1 << 17, np.uint8)) for _ in range(8)]
kept = [one for _, one in both]
del both
full = mb()
heap.trim()
print(full - mb(), all(one.all() for one in kept))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's heap is trimmed")
def test_what_was_freed_before_something_that_is_used_goes_back_to_the_system():
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True)
    freed, kept_bytes = process.stdout.split()
    assert int(freed) >= 20
    assert kept_bytes == "True"
