"""Runs scripts one after the other on the ranks of one launch. Arguments: plan.json folder.

The plan is a list of [number, limit in seconds, what `python` would be given]. Each script finds what it would find if
it were started by itself; what a rank prints meanwhile goes to FOLDER/NUMBER-RANK.out and .err. Where all ranks have
ended it FOLDER/NUMBER-RANK.done holds the exit code. A script goes on to the next where it exits or raises alone, or
where all ranks end it together (`failure.end_together`); any other that fails, or takes too long, ends the job.
"""

import faulthandler
import json
import os
import runpy
import sys
from unittest import mock

from dptrain.comm import current
from dptrain.errors import AgreedError
from dptrain.random import set_default_seed
from dptrain.runtime import exit_codes, failure

plan, folder = sys.argv[1:]
launched = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
rank = launched or "0"
with open(plan) as file:
    cases = json.load(file)
standard = os.dup(1), os.dup(2)
together: list[int] = []  # exit codes of errors that all ranks had


def run(arguments: list[str]) -> int:
    """Do what `python ARGUMENTS` does; return the exit code.

    Raises:
        BaseException: what ends the job.
    """
    together.clear()
    set_default_seed(0)  # and with it the seed of the first model
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code and ((launched is not None and [end.code] != together) or not isinstance(end.code, int)):
            raise  # ends the other ranks, too
        return end.code or 0
    except Exception as error:
        if launched is not None and not isinstance(error, AgreedError):
            raise
        sys.excepthook(type(error), error, error.__traceback__)
        return together[0] if together else 1
    return 0


if launched is not None:

    def end_together(error: AgreedError, end=failure.end_together) -> int:
        """Do all but the abort."""
        with mock.patch.object(failure, "_abort"):
            together.append(end(error))
        return together[-1]

    failure.end_together = end_together

for number, limit, arguments in cases:
    place = os.path.join(folder, f"{number}-{rank}")
    for stream, ending in ((1, "out"), (2, "err")):
        opened = os.open(f"{place}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    faulthandler.dump_traceback_later(limit, exit=True)
    code = run(arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    current().barrier()
    with open(f"{place}.done", "x") as file:
        file.write(str(code))
    current().barrier()  # a rank that fails from here on fails in the next script
    faulthandler.cancel_dump_traceback_later()
if launched is not None:
    exit_codes.requested = 0  # by the scripts
for stream, kept in zip((1, 2), standard, strict=True):
    os.dup2(kept, stream)
