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
  # A hung driver may never answer, and then not even a kill ends nvidia-smi: it is not waited for.
  RANKS=0 status=0
  exec 3< <(exec nvidia-smi -L 2>/dev/null)
  while read -r -t 10 -u 3 word _ || { status=$?; false; }; do
    if [ "$word" = GPU ]; then RANKS=$((RANKS + 1)); fi
  done
  exec 3<&-
  if [ "$status" -gt 128 ]; then
    echo "local.sh: nvidia-smi has not answered within 10 s: starting 2 ranks; RANKS sets another number" >&2
    kill -KILL $! 2>/dev/null || true
    RANKS=0
  fi
  [ "$RANKS" -gt 0 ] || RANKS=2
fi
# Where `env` can: the signals wait until Python takes them.
hold="env --block-signal=TERM,USR1"
$hold true 2>/dev/null || hold=
exec $hold "$PYTHON" -m dptrain launch -n "$RANKS" ${MPIRUN:+--launcher "$MPIRUN"} -- "$PYTHON" -m dptrain "$@"
