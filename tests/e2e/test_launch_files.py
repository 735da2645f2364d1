"""What a cluster user copies from launch/: the batch script under stand-ins, the Kubernetes job against its schema."""

import subprocess
import sys
from pathlib import Path

import yaml

from dptrain.cli.launch import _parse
from tests.launching import run

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
STANDINS = Path(__file__).resolve().parents[1] / "standins" / "commands"

# Stands in for a Python with dptrain: `-m dptrain` saves and stops when told, and is done when it is started again.
TRAINING = """
import os, pathlib, signal, sys, time
if sys.argv[1:4] == ["-m", "dptrain", "launch"]:
    os.execv(REAL, [REAL, *sys.argv[1:]])
assert sys.argv[1:] == ["-m", "dptrain", "--out", "runs/slurm-4711", "--epochs", "3"], sys.argv
saved = pathlib.Path("saved")
if saved.exists():
    os.write(1, b"done\\n")
    sys.exit(0)
told = []
signal.signal(signal.SIGUSR1, lambda *_: told.append(1))
pathlib.Path(f"ready-{os.environ['SLURM_PROCID']}").touch()
while not told: time.sleep(0.01)
if os.environ["SLURM_PROCID"] == "0":
    time.sleep(1)
    saved.touch()
sys.exit(75)
"""


def test_slurm_script(tmp_path):
    """Its time is up: the ranks save, the job goes back into the queue, and is done the next time."""
    python = tmp_path / "python"
    python.write_text(f"#!{sys.executable}\nREAL = {sys.executable!r}\n{TRAINING}")
    python.chmod(0o755)
    script = tmp_path / "slurm.sh"
    text = (LAUNCH / "slurm.sh").read_text()
    assert "#SBATCH --ntasks-per-node=4\n" in text
    script.write_text(text.replace("#SBATCH --ntasks-per-node=4\n", "#SBATCH --ntasks-per-node=1\n"))
    environment = {
        "PATH": f"{STANDINS}:/usr/bin:/bin",
        "STANDIN_NODES": "n1,n2",
        "STANDIN_TIME_IS_UP": str(tmp_path / "up"),
        "STANDIN_REQUEUED": str(tmp_path / "requeued"),
        "PYTHON": str(python),
        "LAUNCHER": "srun",
    }
    when_ready = subprocess.Popen(
        ["sh", "-c", "until [ -e ready-0 ] && [ -e ready-1 ]; do sleep 0.1; done; touch up"], cwd=tmp_path
    )
    try:
        done = run([str(STANDINS / "sbatch"), str(script), "--epochs", "3"], cwd=tmp_path, **environment)
    finally:
        when_ready.kill()
        when_ready.wait()
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["done", "done"]
    assert done.err.count("SIGUSR1: the ranks are told to save and stop") == 1


def fits(value, schema, where="MPIJob"):
    """Check a value of YAML against a schema: a type, a set of words, a list of one schema, or one for each key.

    A key with "!" must be there; of what is not in the schema, nothing may.
    """
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        known = {key.rstrip("!"): one for key, one in schema.items()}
        assert set(value) <= set(known), f"{where}: unknown {set(value) - set(known)}"
        missing = {key[:-1] for key in schema if key.endswith("!")} - set(value)
        assert not missing, f"{where}: no {missing}"
        for key, one in value.items():
            fits(one, known[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for number, one in enumerate(value):
            fits(one, schema[0], f"{where}[{number}]")
    elif isinstance(schema, set):
        assert value in schema, f"{where}: {value!r}"
    else:
        assert type(value) is schema, f"{where}: {value!r}"


QUANTITIES = {"cpu": int, "memory": str, "nvidia.com/gpu": int}
CONTAINER = {
    "name!": str,
    "image!": str,
    "command": [str],
    "args": [str],
    "securityContext": {"runAsUser": int},
    "volumeMounts": [{"name!": str, "mountPath!": str}],
    "resources": {"limits": QUANTITIES, "requests": QUANTITIES},
    "readinessProbe": {"tcpSocket": {"port!": int}, "initialDelaySeconds": int},
}
POD = {
    "terminationGracePeriodSeconds": int,
    "containers!": [CONTAINER],
    "volumes": [{"name!": str, "persistentVolumeClaim": {"claimName!": str}}],
}
REPLICAS = {"replicas": int, "restartPolicy": {"Never", "OnFailure"}, "template!": {"spec!": POD}}
# Of kubeflow.org/v2beta1, pkg/apis/kubeflow/v2beta1/types.go of kubeflow/mpi-operator, and of Kubernetes' core/v1.
MPI_JOB = {
    "apiVersion!": {"kubeflow.org/v2beta1"},
    "kind!": {"MPIJob"},
    "metadata!": {"name!": str},
    "spec!": {
        "slotsPerWorker": int,
        "mpiImplementation": {"OpenMPI", "Intel", "MPICH"},
        "sshAuthMountPath": str,
        "launcherCreationPolicy": {"AtStartup", "WaitForWorkersReady"},
        "runPolicy": {"cleanPodPolicy": {"All", "Running", "None"}, "backoffLimit": int, "activeDeadlineSeconds": int},
        "mpiReplicaSpecs!": {"Launcher!": REPLICAS, "Worker!": REPLICAS},
    },
}


def test_kubernetes_job():
    job = yaml.safe_load((LAUNCH / "mpijob.yaml").read_text())
    fits(job, MPI_JOB)
    spec = job["spec"]
    pods = {name: one["template"]["spec"] for name, one in spec["mpiReplicaSpecs"].items()}
    for pod in pods.values():
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    (container,) = pods["Launcher"]["containers"]
    *start, launch = container["command"][:4]
    assert (start, launch) == (["python", "-m", "dptrain"], "launch")
    options, command = _parse([*container["command"][4:], *container["args"]])
    assert options.min_ranks <= spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert command[:3] == ["python", "-m", "dptrain"]
