"""Runs scripts one after the other on the ranks of one launch. Arguments: plan.json folder.

The plan is a list of [number, limit in seconds, what `python` would be given]. Each script finds what it would find if
it were started by itself; what a rank prints meanwhile goes to FOLDER/NUMBER-RANK.out and .err. Where all ranks have
ended it FOLDER/NUMBER-RANK.done holds the exit code. A script that raises, or takes too long, ends the job.
"""

import faulthandler
import json
import os
import runpy
import sys

plan, folder = sys.argv[1:]
launched = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK")
rank = launched or "0"
with open(plan) as file:
    cases = json.load(file)
standard = os.dup(1), os.dup(2)
for number, limit, arguments in cases:
    place = os.path.join(folder, f"{number}-{rank}")
    for stream, ending in ((1, "out"), (2, "err")):
        opened = os.open(f"{place}.{ending}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(opened, stream)
        os.close(opened)
    faulthandler.dump_traceback_later(limit, exit=True)
    code = 0
    try:
        if arguments[0] == "-m":
            sys.argv, sys.path[0] = arguments[1:], os.getcwd()
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv, sys.path[0] = arguments, os.path.dirname(arguments[0])
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as end:
        if end.code and (launched is not None or not isinstance(end.code, int)):
            raise  # ends the other ranks, too
        code = end.code or 0
    sys.stdout.flush()
    sys.stderr.flush()
    from dptrain.comm import current

    current().barrier()
    with open(f"{place}.done", "x") as file:
        file.write(str(code))
    current().barrier()  # a rank that fails from here on fails in the next script
    faulthandler.cancel_dump_traceback_later()
for stream, kept in zip((1, 2), standard, strict=True):
    os.dup2(kept, stream)
