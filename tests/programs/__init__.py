"""Random programs: drawn from a seed, executed by every backend, compared, and made small where one is wrong.

- `case.py`: a program as a few lines of Python text, with its inputs and what becomes of its state.
- `draw.py`: `program(seed)` draws one; which lengths, ops and situations it must draw.
- `draw_loops.py`: lines with loops and branches.
- `memory.py`: how arrays lie in memory that it is given.
- `exact.py`: what a program computes in float64, and how much of that rounding may change.
- `check.py`: executes a case by C++ or CUDA, alone, on ranks and in packs, and says what is wrong.
- `meshes.py`: executes a case on a mesh of ranks, with its variables sharded.
- `interpreted.py`: executes kernels in their planned memory by NumPy, without a compiler.
- `files.py`: executes a case whose program has been in a file.
- `shrink.py`: makes a wrong case small.
- `corpus.py`: cases that were wrong once.
- `table.py`: programs by name, which every way of executing programs must compute.

The idea is NNSmith's (J. Liu et al., "NNSmith: Generating diverse and valid test cases for deep learning compilers",
ASPLOS 2023): grow a valid program op by op, keep its numbers sane, execute it by two means, compare.
"""
