"""Random programs by every backend: do C++ and CUDA compute what NumPy does in float64?

    python benchmarks/fuzz_programs.py --minutes 60 --seed 1000
    python benchmarks/fuzz_programs.py --minutes 60 --device mesh
    tests/emulator/run python benchmarks/fuzz_programs.py --minutes 60 --device cuda
    python benchmarks/fuzz_programs.py --only 1234    # one program, with its text

Programs are drawn from `--seed` on, one number each (`tests/programs`), and executed alone, on simulated ranks and, on
CUDA, in packs; for "mesh" on the CPU, by ranks that are threads, with variables sharded over a mesh. On the CPU loops
and their gradients are compared with steps that are written down, too. What is wrong is made small and printed as text
that `tests/programs/corpus.py` takes. The last lines say how many programs there were, what of all that must be drawn
was not, and which lines of the generators none of them reached (`--coverage`, which needs coverage.py and takes
longer). The exit code is 1 if anything was wrong.
"""

import argparse
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# Whose lines `--coverage` counts.
GENERATORS = {
    "cpu": (
        *("backend/cpu/codegen.py", "backend/cpu/calls.py", "program/body.py", "program/steps.py", "ops/scan.py"),
        *(f"program/codegen/{name}.py" for name in ("fuse", "merge", "kernels", "cpp", "views")),
    ),
    "mesh": (
        *("backend/cpu/compiled.py", "program/codegen/fuse.py", "program/body.py"),
        *(f"program/sharding/{name}.py" for name in ("local", "messages", "placement")),
    ),
    "cuda": (
        *(f"backend/cuda/{name}.py" for name in ("compose", "expressions", "generate", "groups", "products", "loops")),
        *(f"backend/cuda/{name}.py" for name in ("attention", "executable")),
    ),
}


def checker(device: str, stack: ExitStack) -> Callable[[Any], str]:
    """Return what says what is wrong with a case on a device."""
    from tests.programs.check import wrong_beside_unrolled, wrong_on_cpu, wrong_on_cuda
    from tests.programs.meshes import wrong_on_mesh

    if device == "mesh":
        return lambda case: wrong_on_mesh(case, compiles=case.seed % 16 == 0)  # each rank's program may be another one
    if device == "cpu":
        # Optimizing takes most of the time.
        return lambda case: wrong_on_cpu(case, thorough=case.seed % 4 == 0) or wrong_beside_unrolled(case)
    from dptrain.backend.cuda.backend import CudaBackend

    backend = CudaBackend()
    stack.callback(backend.close)

    def wrong(case: Any) -> str:
        with ExitStack() as opened:

            def another() -> CudaBackend:
                backend = CudaBackend()
                backend.joins_packs = True
                opened.callback(backend.close)
                return backend

            return wrong_on_cuda(case, backend, another)

    return wrong


def main() -> int:
    """Draw, execute, compare, and tell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--device", choices=("cpu", "cuda", "mesh"), default="cpu")
    parser.add_argument("--only", type=int, help="this program alone")
    parser.add_argument("--coverage", action="store_true", help="of the generators' branches")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    measured = _coverage(options.device) if options.coverage else None  # before the generators are imported
    from tests.programs.draw import program
    from tests.programs.features import WANTED, features
    from tests.programs.shrink import shrunk

    failures: Counter[str] = Counter()
    findings, seed = 0, options.seed if options.only is None else options.only
    end = time.monotonic() + 60 * options.minutes
    first = seed
    with ExitStack() as stack:
        wrong = checker(options.device, stack)
        while seed == first or (options.only is None and time.monotonic() < end):
            case = program(seed, options.device)
            if options.only is not None:
                print(case)
            fault = wrong(case)
            if fault:
                findings += 1
                print(f"program {seed}: {fault}", flush=True)
                small = shrunk(case, wrong)
                print(f"{wrong(small)}\n{small}\n", flush=True)
            else:
                failures.update(features(case))
            seed += 1
    print(f"{seed - first} programs from {first} on {options.device}, {findings} wrong")
    if options.only is None:
        print(f"not drawn: {', '.join(sorted(WANTED - set(failures))) or 'nothing'}")
    if measured is not None:
        measured.stop()
        measured.report(show_missing=True, skip_empty=True)
    return int(findings > 0)


def _coverage(device: str) -> Any:
    """Return what counts the generators' branches."""
    import coverage

    collector = coverage.Coverage(
        branch=True, data_file=None, include=[str(ROOT / "dptrain" / name) for name in GENERATORS[device]]
    )
    collector.start()
    return collector


if __name__ == "__main__":
    sys.exit(main())
