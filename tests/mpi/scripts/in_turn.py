"""Runs scripts one after the other on the ranks of one launch. Arguments: plan.json folder.

The plan is a list of [number, limit in seconds, script and its arguments]. Each script finds what it would find if it
were started by itself; what a rank prints meanwhile goes to FOLDER/NUMBER-RANK.out and .err. Where all ranks have
ended it there is FOLDER/NUMBER-RANK.done. A script that raises, or takes too long, ends the job.
"""

import faulthandler
import json
import os
import runpy
import sys

plan, folder = sys.argv[1:]
rank = os.environ.get("PMI_RANK") or os.environ.get("OMPI_COMM_WORLD_RANK") or "0"
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
    sys.argv = arguments
    sys.path[0] = os.path.dirname(arguments[0])
    runpy.run_path(arguments[0], run_name="__main__")
    from dptrain.comm import current

    current().barrier()  # a rank that fails from here on fails in the next script
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    sys.stderr.flush()
    open(f"{place}.done", "x").close()
for stream, kept in zip((1, 2), standard, strict=True):
    os.dup2(kept, stream)
