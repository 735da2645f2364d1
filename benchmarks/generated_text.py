"""Is the C++ and CUDA C++ of two versions the same text, of random programs, of those of the tests and of models?

    git worktree add ../before 1234567
    python benchmarks/generated_text.py --before ../before --programs 1000 --show 3

A change that only makes compilation faster or the generators smaller changes no letter, which says more than any
measurement. Both versions draw the same programs (`tests/programs` of this folder). Where texts differ, the first lines
that do are shown, and the exit code is 1.
"""

import argparse
import difflib
import sys
import warnings
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from common import WorkerProcess, answer, answering

ROOT = Path(__file__).resolve().parents[1]
MODELS = ("dense 10", "lenet", "resnet50")


def main() -> int:
    """Compare, or write the texts of one version."""
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--before", type=Path, help="a folder with the other version's dptrain/ and kernels/")
    parser.add_argument("--programs", type=int, default=300, help="random ones")
    parser.add_argument("--seed", type=int, default=0, help="of the first of them")
    parser.add_argument("--models", nargs="*", default=MODELS, choices=MODELS)
    parser.add_argument("--show", type=int, default=1, help="differences")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work()
        return 0
    if options.before is None:
        parser.error("--before is required")
    command = [sys.executable, str(Path(__file__).resolve()), "--worker"]
    before, after = (
        WorkerProcess(name, command, {"PYTHONPATH": str(folder.resolve())})
        for name, folder in (("before", options.before), ("after", ROOT))
    )
    seeds = range(options.seed, options.seed + options.programs)
    named = [*before.ask(["corpus"]), *(f"program {seed}" for seed in seeds), *options.models]
    differ = compared = 0
    for name in named:
        texts = [worker.ask(["texts", name]) for worker in (before, after)]
        compared += len(texts[1])
        for kind in texts[0].keys() | texts[1].keys():
            pair = [text.get(kind, "no such text").splitlines() for text in texts]
            if pair[0] != pair[1]:
                differ += 1
                print(f"{name}, {kind}: another text")
                if differ <= options.show:
                    print("\n".join(islice(difflib.unified_diff(*pair, lineterm="", n=1), 60)))
    print(f"{len(named)} programs, {compared} texts, {differ} of them differ")
    return int(differ > 0)


def work() -> None:
    """Answer as one version."""
    sys.path.append(str(ROOT))  # for the tests' programs; dptrain itself is the version's
    warnings.simplefilter("ignore")
    from tests.programs.corpus import CORPUS

    questions, answers = answering()
    for kind, *arguments in questions:
        answer(answers, list(CORPUS) if kind == "corpus" else dict(texts_of(*arguments)))


def texts_of(name: str) -> Iterator[tuple[str, str]]:
    """Yield what is generated of a program, by backend and ranks."""
    from compile_time import built

    from dptrain.backend.cpu.codegen import NeedsPythonError, generate
    from dptrain.backend.cuda.compose import Composition
    from dptrain.errors import ConfigError
    from dptrain.models.explaining import program_of
    from dptrain.program.codegen.fuse import fuse
    from dptrain.program.sharding.placement import place
    from dptrain.program.steps import without_ranks
    from tests.programs.corpus import CORPUS
    from tests.programs.draw import program

    if name in MODELS:
        programs: dict[str, Any] = dict.fromkeys(("alone", "on ranks"), program_of(built(name)))
    else:
        case = CORPUS[name] if name in CORPUS else program(int(name.split()[1]))
        programs = {"alone": case.trace(), **({"on ranks": place(case.trace())} if case.shards else {})}
    for where, placed in programs.items():
        alone = where == "alone"
        for join in (True, False):
            how = f"C++ {where}{'' if join else ', each op alone'}"
            try:
                code = generate(fuse(without_ranks(placed) if alone else placed, join=join))
            except NeedsPythonError:  # a step of a loop has an op that only NumPy can execute
                yield how, "by NumPy"
                continue
            shape = f"{len(code.roots)} roots, {[getattr(part, 'name', type(part).__name__) for part in code.parts]}"
            yield how, f"{shape}\n{code.source}"
        try:
            composition = Composition(placed, placed.rows, alone=alone)
        except ConfigError as error:  # an op has no kernel
            yield f"CUDA C++ {where}", str(error)
        else:
            yield f"CUDA C++ {where}", f"{sorted(composition.plan.offsets.values())}\n{composition.source()}"


if __name__ == "__main__":
    sys.exit(main())
