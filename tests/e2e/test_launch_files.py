"""What a cluster user copies from launch/: the batch script under stand-ins, the Kubernetes job against its schema."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from dptrain.cli.commands.launch import _parse
from dptrain.cli.main import _build_parser
from tests.launching import run

LAUNCH = Path(__file__).resolve().parents[2] / "launch"
STANDINS = Path(__file__).resolve().parents[1] / "standins" / "commands"

# Stands in for a Python with dptrain: `-m dptrain` saves and stops when told, and is done when it is started again.
TRAINING = """
import os, pathlib, signal, sys, time
if sys.argv[1:4] == ["-m", "dptrain", "launch"]:
    os.execv(REAL, [REAL, *sys.argv[1:]])
assert sys.argv[1:] == ["-m", "dptrain", *WORDS], sys.argv
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


def prepared(folder, name, words, ranks):
    """Return a batch script of fewer ranks a node, and the environment in which a stand-in of dptrain takes words."""
    python = folder / "python"
    python.write_text(f"#!{sys.executable}\nREAL = {sys.executable!r}\nWORDS = {words!r}\n{TRAINING}")
    python.chmod(0o755)
    text = (LAUNCH / name).read_text()
    assert "#SBATCH --ntasks-per-node=4\n" in text
    script = folder / name
    script.write_text(text.replace("#SBATCH --ntasks-per-node=4\n", f"#SBATCH --ntasks-per-node={ranks}\n"))
    environment = {
        "PATH": f"{STANDINS}:/usr/bin:/bin",
        "STANDIN_TIME_IS_UP": str(folder / "up"),
        "STANDIN_REQUEUED": str(folder / "requeued"),
        "PYTHON": str(python),
        "LAUNCHER": "srun",
    }
    return script, environment


def until_its_time_is_up(folder, *arguments, **environment):
    """Run the stand-in of sbatch, whose time is up when two ranks are ready."""
    when_ready = subprocess.Popen(
        ["sh", "-c", "until [ -e ready-0 ] && [ -e ready-1 ]; do sleep 0.1; done; touch up"], cwd=folder
    )
    try:
        return run([str(STANDINS / "sbatch"), *arguments], cwd=folder, **environment)
    finally:
        when_ready.kill()
        when_ready.wait()


def test_slurm_script(tmp_path):
    """Its time is up: the ranks save, the job goes back into the queue, and is done the next time."""
    script, environment = prepared(tmp_path, "slurm.sh", ["--out", "runs/slurm-4711", "--epochs", "3"], 1)
    done = until_its_time_is_up(tmp_path, str(script), "--epochs", "3", STANDIN_NODES="n1,n2", **environment)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["done", "done"]
    assert done.err.count("SIGUSR1: asking the ranks to save and stop") == 1


def test_slurm_array_script(tmp_path):
    """A task takes its line of the file, saves when its time is up, and is done the next time."""
    (tmp_path / "sweeps.txt").write_text("--seeds 0-1\n--grid hidden=32,64 --name 'two words $(touch code)'\n")
    words = ["sweep", "--out", "sweeps/slurm-4700/2", "--grid", "hidden=32,64", "--name", "two words $(touch code)"]
    script, environment = prepared(tmp_path, "slurm-array.sh", [*words, "--epochs", "3"], 2)
    environment |= {"STANDIN_NODES": "n1", "STANDIN_ARRAY_TASK": "2"}
    done = until_its_time_is_up(tmp_path, str(script), "sweeps.txt", "--epochs", "3", **environment)
    assert done.code == 0, done.err
    assert done.out.splitlines() == ["done", "done"]
    assert not (tmp_path / "code").exists()


def test_slurm_array_script_without_a_line_for_a_task(tmp_path):
    (tmp_path / "sweeps.txt").write_text("--seeds 0-1\n")
    script, environment = prepared(tmp_path, "slurm-array.sh", [], 2)
    command = [str(STANDINS / "sbatch"), str(script), "sweeps.txt"]
    done = run(command, cwd=tmp_path, STANDIN_ARRAY_TASK="2", **environment)
    assert (done.code, done.out) == (2, "")
    assert done.err == "slurm-array.sh: sweeps.txt has no line 2, or an empty one\n"


STAND_IN_OF_NVIDIA_SMI = {
    "none": ("exit 127", 2),
    "three": ("echo 'GPU 0: A'; echo '  MIG 1g.5gb'; echo 'GPU 1: A'; echo 'GPU 2: A'", 3),
    "hangs": ("echo 'GPU 0: A'; exec sleep 600", 2),
}


@pytest.mark.parametrize("case", ["none", "three", pytest.param("hangs", marks=pytest.mark.long)])
def test_local_script_counts_the_gpus_and_does_not_wait_for_a_hung_driver(tmp_path, case):
    text, ranks = STAND_IN_OF_NVIDIA_SMI[case]
    for name, lines in (("nvidia-smi", text), ("python", 'echo "$*"')):
        (tmp_path / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tmp_path / name).chmod(0o755)
    path = f"{tmp_path}:/usr/bin:/bin"
    done = run(["bash", str(LAUNCH / "local.sh"), "--epochs", "3"], timeout=60, PATH=path, PYTHON="python", RANKS=None)
    assert (done.code, done.out) == (0, f"-m dptrain launch -n {ranks} -- python -m dptrain --epochs 3\n")
    expected = "local.sh: nvidia-smi has not answered within 10 s: starting 2 ranks; RANKS sets another number\n"
    assert done.err == (expected if case == "hangs" else "")


@pytest.mark.parametrize("name", ["local.sh", "slurm.sh", "slurm-array.sh"])
def test_shell_scripts_are_clean(name):
    if shutil.which("shellcheck") is None:
        pytest.skip("no shellcheck")
    done = run(["shellcheck", str(LAUNCH / name)])
    assert done.code == 0, done.out


def fits(value, schema, where="MPIJob"):
    """Check a value of YAML against a schema: a type, a set of words, a list of one schema, or one for each key.

    A key with "!" must be there; of what is not in the schema, nothing may.
    """
    if isinstance(schema, dict):
        assert isinstance(value, dict), where
        fields = {key.rstrip("!"): field for key, field in schema.items()}
        assert set(value) <= set(fields), f"{where}: unknown {set(value) - set(fields)}"
        missing = {key[:-1] for key in schema if key.endswith("!")} - set(value)
        assert not missing, f"{where}: no {missing}"
        for key, entry in value.items():
            fits(entry, fields[key], f"{where}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), where
        for number, entry in enumerate(value):
            fits(entry, schema[0], f"{where}[{number}]")
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
    pods = {name: replica["template"]["spec"] for name, replica in spec["mpiReplicaSpecs"].items()}
    for pod in pods.values():
        mounted = {mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
    (container,) = pods["Launcher"]["containers"]
    *start, launch = container["command"][:4]
    assert (start, launch) == (["python", "-m", "dptrain"], "launch")
    options, command = _parse([*container["command"][4:], *container["args"]])
    assert options.min_ranks <= spec["slotsPerWorker"] * spec["mpiReplicaSpecs"]["Worker"]["replicas"]
    assert command[:3] == ["python", "-m", "dptrain"]


def instructions():
    """Return the Dockerfile as (instruction, rest), lines that go on joined and comments left out."""
    lines = [line for line in (LAUNCH / "Dockerfile").read_text().splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [tuple(line.split(None, 1)) for line in joined.splitlines() if line.strip()]


def test_dockerfile():
    steps = instructions()
    keywords = {"FROM", "ARG", "RUN", "WORKDIR", "COPY", "USER", "EXPOSE", "CMD"}
    assert {name for name, _ in steps} <= keywords
    assert steps[0][0] == "FROM"
    assert [arguments for name, arguments in steps if name == "USER"] == ["1000"]
    for name, arguments in steps:
        if name == "COPY":
            *sources, _ = arguments.split()
            assert all((LAUNCH.parent / source).exists() for source in sources), arguments
        if name == "RUN":
            done = run(["sh", "-n", "-c", arguments])
            assert (done.code, done.err) == (0, ""), arguments
    extras = tomllib.loads((LAUNCH.parent / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    groups = re.findall(r"'\.\[([^]]*)\]'", "".join(arguments for _, arguments in steps))
    assert groups
    assert {extra for group in groups for extra in group.split(",")} <= set(extras)
    assert json.loads(steps[-1][1])[:3] == ["python", "-m", "dptrain"]


def test_the_image_has_what_its_commands_in_comments_and_the_kubernetes_job_need():
    text = "\n".join(" ".join(instruction) for instruction in instructions())
    worker = yaml.safe_load((LAUNCH / "mpijob.yaml").read_text())["spec"]["mpiReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["command"][0] == "/usr/sbin/sshd"
    assert "openssh-server" in text
    assert f"> {container['command'][-1]}" in text
    assert f"ARG PORT={container['readinessProbe']['tcpSocket']['port']}\n" in text
    assert f"useradd --create-home --uid {container['securityContext']['runAsUser']} mpiuser" in text
    assert f"HostKey {yaml.safe_load((LAUNCH / 'mpijob.yaml').read_text())['spec']['sshAuthMountPath']}/id_rsa" in text
    comments = (LAUNCH / "Dockerfile").read_text().replace("\\\n#", "")
    for words in re.findall(r"python -m dptrain((?: --\S+ \S+)*)", comments):
        _build_parser("train").parse_args(words.split())
