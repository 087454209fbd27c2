"""The files and lines that start fastlatent by Slurm, Kubernetes, SkyPilot, Ray and Docker: their
commands are understood. No engine runs here; the tests set the variables that it would set."""

import os
import re
import shlex
import subprocess
import sys
import time

import pytest
import torch.distributed.run
import yaml

from common.config.compose import compose
from common.files import ROOT
from tests.harness.outcomes import FOUR_STEPS, read_columns
from tests.harness.zygote import find_free_port

SLURM = {
    "SLURM_JOB_NODELIST": "node[0-1]",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_CPUS_PER_TASK": "64",
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "5",
}
SKY = {
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "SKYPILOT_TASK_ID": "sky-5",
}
TRAINING = "experiment=fullrun run_dir=/shared/runs/mine data=resident data.path=/shared/latents"
STUBS = {
    ".venv/bin/python": 'printf "%s\\n" "$@" >> calls; echo >> calls',
    "bin/python": 'exec .venv/bin/python "$@"',
    "bin/srun": 'exec "$@"',
    "bin/scontrol": "echo node0; echo node1",
}
RAY = """
from types import SimpleNamespace
remote = lambda **_: lambda function: SimpleNamespace(remote=function)
init = lambda **_: None
get = list
"""
SCALING = (ROOT / "docs" / "scaling.md").read_text()


def read_yaml(name):
    return list(yaml.safe_load_all((ROOT / "scripts" / name).read_text()))


def read_job(name):
    """Returns the specification of a Kubernetes job, and its only container."""
    job = read_yaml(name)[-1]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    return job, container


def read_command(name):
    """Returns the command of the pods of a Kubernetes job."""
    _, container = read_job(name)
    return [*container["command"], *container["args"]]


def save_program(file, line):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(f"#!/bin/bash\n{line}\n")
    file.chmod(0o755)


@pytest.fixture
def start(tmp_path):
    """`start(command, **variables)` runs a command, and returns the words of each call of Python,
    which does nothing."""
    for name, line in STUBS.items():
        save_program(tmp_path / name, line)

    def run(command, **variables):
        path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PATH": path, **variables},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        calls = (tmp_path / "calls").read_text().strip("\n")
        return [call.splitlines() for call in calls.split("\n\n")]

    return run


@pytest.mark.parametrize(
    ("command", "variables", "endpoint", "is_host"),
    [
        (
            ["bash", str(ROOT / "scripts/slurm/train.sbatch"), *TRAINING.split()],
            SLURM,
            "node0:29500",
            None,
        ),
        (
            ["bash", "-c", read_yaml("sky/train.yaml")[0]["run"]],
            SKY | {"WORDS": TRAINING},
            "10.0.0.1:29500",
            "0",
        ),
        (
            read_command("k8s/train.yaml"),
            {"JOB_COMPLETION_INDEX": "0"},
            "fastlatent-0.fastlatent:29500",
            "1",
        ),
    ],
    ids=["slurm", "sky", "k8s"],
)
def test_several_machines_train(command, variables, endpoint, is_host, start):
    ((option, module, *words),) = start(command, **variables)
    assert (option, module) == ("-m", "torch.distributed.run")
    launch = torch.distributed.run.parse_args(words)
    assert (launch.nnodes, launch.nproc_per_node) == ("2", "8")
    assert (launch.rdzv_backend, launch.rdzv_endpoint) == ("c10d", endpoint)
    assert launch.rdzv_conf == (f"is_host={is_host}" if is_host else "")
    assert launch.max_restarts == 3
    assert launch.training_script == "train.py"
    assert compose(launch.training_script_args).cfg.run_dir == "/shared/runs/mine"


def find_block(language, word):
    """Returns the block of docs/scaling.md that has a word."""
    blocks = re.findall(rf"```{language}\n(.*?)```", SCALING, re.DOTALL)
    (block,) = [block for block in blocks if word in block]
    return block


def find_array():
    """Returns the command of each task of the Slurm array."""
    (line,) = [line for line in find_block("sh", "--array").splitlines() if "--array" in line]
    return ["bash", "-c", shlex.split(line)[-1]]


@pytest.mark.parametrize(
    ("command", "variables", "part"),
    [
        (find_array(), {"SLURM_ARRAY_TASK_ID": "3"}, "3/64"),
        (read_command("k8s/encode.yaml"), {"JOB_COMPLETION_INDEX": "3"}, "3/8"),
        (["bash", "-c", read_yaml("sky/encode.yaml")[0]["run"]], {"PART": "3/8"}, "3/8"),
    ],
    ids=["slurm", "k8s", "sky"],
)
def test_several_machines_encode(command, variables, part, start):
    ((program, *words),) = start(command, **variables)
    assert program == "precompute_latents.py"
    assert compose(words, "precompute_latents").cfg.part == part


def test_ray_encodes(start, tmp_path):
    """A module that calls at once stands in for Ray."""
    (tmp_path / "ray.py").write_text(RAY)
    calls = start([sys.executable, "-c", find_block("python", "ray")])
    assert [words[-1] for words in calls] == [f"part={index}/64" for index in range(64)]
    assert compose(calls[0][1:], "precompute_latents").cfg.source == "/data/photos"


def test_the_files_of_kubernetes_agree_with_themselves():
    service, _ = read_yaml("k8s/train.yaml")
    job, container = read_job("k8s/train.yaml")
    command = read_command("k8s/train.yaml")[-1]
    name = service["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": name}
    assert job["template"]["spec"]["subdomain"] == name
    assert f"--rdzv-endpoint={name}-0.{name}:" in command
    assert f"--nnodes={job['completions']} " in command
    assert f"--nproc-per-node={container['resources']['limits']['nvidia.com/gpu']} " in command
    (patience,) = [int(variable["value"]) for variable in container["env"]]
    assert patience < job["template"]["spec"]["terminationGracePeriodSeconds"]
    encode, _ = read_job("k8s/encode.yaml")
    assert f"/{encode['completions']}" in read_command("k8s/encode.yaml")[-1]
    for name in ("k8s/train.yaml", "k8s/encode.yaml"):
        spec, container = read_job(name)
        assert (spec["completionMode"], spec["parallelism"]) == ("Indexed", spec["completions"])
        volumes = [volume["name"] for volume in spec["template"]["spec"]["volumes"]]
        assert [mount["name"] for mount in container["volumeMounts"]] == volumes


@pytest.mark.parametrize(
    "name",
    [
        "sky/train.yaml",
        "sky/encode.yaml",
        "k8s/train.yaml",
        "k8s/encode.yaml",
        "slurm/train.sbatch",
    ],
)
def test_a_launcher_has_two_lines_to_edit(name):
    assert (ROOT / "scripts" / name).read_text().count("# edit: ") == 2


def test_the_image_holds_what_a_run_needs_and_what_is_tested():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    (version,) = re.findall(r"^torch==(.*)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert [line.startswith(f"FROM pytorch/pytorch:{version}-") for line in lines].count(True) == 1
    assert "RUN python3 -m venv --system-site-packages .venv && make setup" in lines
    copied = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert all((ROOT / name).exists() for name in copied)
    packages = {file.parent.name for file in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages | {"conf"} == {name for name in copied if (ROOT / name).is_dir()}


@pytest.mark.slow
@pytest.mark.fault("a machine of two that is lost", "the engine starts all again; the same losses")
def test_a_lost_machine(tmp_path):
    """Two shells stand in for two machines of SkyPilot. One loses all its processes in the third
    step. Each machine that ends with an error is started again, as engines do."""
    save_program(tmp_path / ".venv/bin/python", f'exec {sys.executable} "$@"')
    port = find_free_port()
    script = read_yaml("sky/train.yaml")[0]["run"].replace("29500", str(port))
    script = script.replace("train.py", "-m tests.harness.parallel_worker")
    script = script.replace("is_host", "read_timeout=10,is_host")  # instead of a minute

    def start_machine(rank, folder, **variables):
        words = [*FOUR_STEPS, "save_every=1", f"run_dir={folder}"]
        pretended = SKY | {
            "SKYPILOT_NODE_RANK": str(rank),
            "SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1",
            "SKYPILOT_NUM_GPUS_PER_NODE": "1",
            "WORDS": shlex.join(words),
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
        }
        environment = os.environ | pretended | variables
        return subprocess.Popen(["bash", "-c", script], cwd=tmp_path, env=environment)

    fault = {"FAULT": "lose:any:3", "FAULT_MARKER": str(tmp_path / "died")}
    for folder, variables in ((tmp_path / "whole", {}), (tmp_path / "lost", fault)):
        machines = [start_machine(0, folder), start_machine(1, folder, **variables)]
        restarts = 0
        while [machine.poll() for machine in machines] != [0, 0] and restarts < 9:
            for rank, machine in enumerate(machines):
                if machine.poll():
                    machines[rank] = start_machine(rank, folder)
                    restarts += 1
            time.sleep(0.1)
        assert [machine.terminate() or machine.wait() for machine in machines] == [0, 0]
    assert (tmp_path / "died").exists()
    losses, expected = (read_columns(tmp_path / name, "loss") for name in ("lost", "whole"))
    assert losses == expected
