#!/usr/bin/env bash
# Train on this machine:  launch/local.sh [dptrain options]
#   RANKS=4        how many ranks; default: one for each GPU, else 2
#   PYTHON=python  the interpreter whose environment holds dptrain
#   MPIRUN=mpirun  the launcher; default: the one beside PYTHON, else the first on PATH
# SIGTERM and SIGUSR1 before the ranks are there end it with exit code 75: nothing was trained.
set -euo pipefail
trap 'exit 75' TERM USR1
PYTHON=${PYTHON:-python}
if [ -z "${RANKS:-}" ]; then
  RANKS=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)
  [ "$RANKS" -gt 0 ] || RANKS=2
fi
# Where `env` can: the signals wait until Python takes them.
hold="env --block-signal=TERM,USR1"
$hold true 2>/dev/null || hold=
exec $hold "$PYTHON" -m dptrain launch -n "$RANKS" ${MPIRUN:+--launcher "$MPIRUN"} -- "$PYTHON" -m dptrain "$@"
