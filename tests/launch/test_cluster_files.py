"""The files that start a run on a cluster: they parse, and say what the program understands."""

import os
import pathlib
import shlex
import shutil
import subprocess
import sys
from unittest import mock

import pytest
import yaml

from jaxrl_llm.commands import command_line
from jaxrl_llm.commands.options import TrainOptions
from jaxrl_llm.config import starters
from jaxrl_llm.sharding import cluster_detection
from jaxrl_llm.storage.address import BucketAddress, HubAddress, parse_address

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "launch"
SHELL = ("slurm.sbatch", "tpu_pod.sh")

# What a JobSet must hold for this program, as a tree of required keys and their types.
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": True},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [
            {
                "name": str,
                "replicas": int,
                "template": {
                    "spec": {
                        "parallelism": int,
                        "completions": int,
                        "completionMode": "Indexed",
                        "backoffLimit": 0,
                        "template": {
                            "spec": {
                                "restartPolicy": "Never",
                                "containers": [
                                    {"name": str, "image": str, "command": list, "env": list}
                                ],
                            }
                        },
                    }
                },
            }
        ],
    },
}


def fitting(value, schema, path="jobset"):
    """Checks that `value` has all of `schema`: keys, types and constants."""
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        for key, inner in schema.items():
            assert key in value, f"{path}.{key} is missing"
            fitting(value[key], inner, f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list) and value, path
        for i, entry in enumerate(value):
            fitting(entry, schema[0], f"{path}[{i}]")
    elif isinstance(schema, type):
        assert type(value) is schema, f"{path}: {value!r}"
    else:
        assert value == schema, f"{path}: {value!r}"


@pytest.fixture(scope="module")
def jobset():
    return yaml.safe_load((LAUNCH / "gke_jobset.yaml").read_text())


def test_the_jobset_has_what_kubernetes_asks_for(jobset):
    fitting(jobset, JOBSET)
    with pytest.raises(AssertionError, match=r"jobset\.spec\.network is missing"):
        fitting({**jobset, "spec": {}}, JOBSET)


def test_the_jobset_counts_its_processes_once(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environ = {entry["name"]: entry.get("value", "") for entry in container["env"]}
    assert spec["parallelism"] == spec["completions"] == int(environ["PODS_PER_JOB"])
    assert job["replicas"] == int(environ["NUM_JOBS"])
    # What the controller fills in.
    environ |= {
        "JOBSET_NAME": jobset["metadata"]["name"],
        "REPLICATED_JOB_NAME": job["name"],
        "JOB_INDEX": "0",
        "JOB_COMPLETION_INDEX": "1",
    }
    with mock.patch.dict(os.environ, environ):
        start = cluster_detection.detect_start()
    assert (start.method, start.num_processes, start.process_id) == ("jobset", 4, 1)
    assert start.coordinator == "jaxrl-llm-train-0-0.jaxrl-llm:8476"
    assert {"containerPort": 8476} in container["ports"]


def test_jobset_starts_an_existing_program(jobset):
    (job,) = jobset["spec"]["replicatedJobs"]
    pod = job["template"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    check_command(container["command"])
    # As many chips as the topology has, and the config's mesh uses.
    rows, columns = map(int, pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x"))
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert rows * columns == chips * job["template"]["spec"]["parallelism"] == 16
    starter = starters.Starter.from_file(starters.find("grpo_8b"))
    assert starter.machine == f"TPU v6e:{rows}x{columns}"


def check_command(words) -> None:
    """Checks that the command parses to a job whose model, data and folder are remote."""
    assert words[:2] == ["jaxrl_llm", "train"]
    options = command_line.parse(TrainOptions, words[2:])
    assert options.start in cluster_detection.START_METHODS
    assert isinstance(parse_address(options.config.model.path, "model"), HubAddress)
    data = options.config.data
    for address in (*data.train_files, *data.eval_files):
        assert isinstance(parse_address(address), BucketAddress)
    assert options.workdir


@pytest.mark.parametrize("name", SHELL)
def test_shell_files_parse(name):
    subprocess.run(["bash", "-n", LAUNCH / name], check=True)


@pytest.mark.parametrize("name", SHELL)
def test_shell_files_pass_shellcheck(name):
    found = shutil.which("shellcheck", path=str(pathlib.Path(sys.executable).parent))
    found = found or shutil.which("shellcheck")
    if not found:
        pytest.skip("shellcheck is not installed")
    result = subprocess.run([found, LAUNCH / name], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", [*SHELL, "gke_jobset.yaml"])
def test_files_say_what_to_change(name):
    assert "To change:" in (LAUNCH / name).read_text()


def test_the_tpu_command_reaches_every_worker_with_its_arguments_whole():
    environ = {"PATH": "/usr/bin:/bin", "DRY_RUN": "1", "TPU_NAME": "a", "WORKDIR": "/runs/a b"}
    override = "--config.rewards.functions={'answer': {'function': 'gsm8k'}}"
    result = subprocess.run(
        ["bash", LAUNCH / "tpu_pod.sh", override],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    words = result.stdout.splitlines()
    assert words[:6] == ["gcloud", "compute", "tpus", "tpu-vm", "ssh", "a"]
    assert "--worker=all" in words
    remote = shlex.split(words[-1].removeprefix("--command="))
    assert remote[-1] == override
    check_command(remote)
    assert "--workdir=/runs/a b" in remote


def test_slurm_starts_one_process_a_node_with_srun(tmp_path):
    """The batch file is run with an `srun` that shows what it was given."""
    srun = tmp_path / "srun"
    srun.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    srun.chmod(0o755)
    environ = {
        "PATH": f"{tmp_path}:/usr/bin:/bin",
        "HOME": "/home/me",
        "SLURM_JOB_NAME": "job",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }
    result = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch", "--config.seed=1"],
        capture_output=True,
        text=True,
        check=True,
        env=environ,
    )
    words = result.stdout.splitlines()
    assert words[0] == "--kill-on-bad-exit=1" and words[-1] == "--config.seed=1"
    check_command(words[1:])
    assert "--workdir=s3://my-bucket/runs/job" in words
    assert "#SBATCH --ntasks-per-node=1" in (LAUNCH / "slurm.sbatch").read_text()
