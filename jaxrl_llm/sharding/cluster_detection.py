"""Cluster detection: process id, number of processes and coordinator, from launcher or flags.

A process has a host or a single GPU.
"""

import dataclasses
import functools
import glob
import importlib.util
import os
import re
import typing
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from typing import Any

# jax has no public names for these; they read the variables of a launcher.
from jax._src.clusters import OmpiCluster, SlurmCluster

from jaxrl_llm.config import ProcessesConfig
from jaxrl_llm.errors import UserError

_FLAGS = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "num_processes": "JAX_NUM_PROCESSES",
    "process_id": "JAX_PROCESS_ID",
}
START_METHODS = typing.get_args(typing.get_type_hints(ProcessesConfig)["start"])
ALL_DEVICES = -1

_PORT = 8476  # of the coordinator in process 0, unless derived from the launcher's job id


class ClusterError(UserError, ValueError):
    """The processes of a run cannot find each other; the message names what is missing."""


@dataclasses.dataclass(frozen=True)
class ProcessStart:
    """How this process joins the run: coordinator, process id and count, local device."""

    method: str  # one of `START_METHODS`, except "auto"
    coordinator: str = ""  # HOST:PORT of process 0
    num_processes: int = 1
    process_id: int = 0
    local_device: int = ALL_DEVICES  # the only device of its host that this process uses


def detect_start(
    method: str = "auto", coordinator: str = "", num_processes: int = -1, process_id: int = -1
) -> ProcessStart:
    """Detects the coordinator, the number of processes, and the id of this one.

    Arguments other than "" and -1 win over `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`; these win over the launcher. "auto" uses the launcher whose variables are
    set; without any, a single process. Raises ClusterError if a setting is missing or wrong.
    """
    number = functools.partial(_env_number, "addresses")
    settings: dict[str, Any] = {
        "coordinator": coordinator or os.environ.get(_FLAGS["coordinator"], ""),
        "num_processes": num_processes if num_processes >= 0 else number(_FLAGS["num_processes"]),
        "process_id": process_id if process_id >= 0 else number(_FLAGS["process_id"]),
    }
    explicit = {name: value for name, value in settings.items() if value not in ("", -1)}
    if method == "auto":
        method = next((name for name, present in _IS_PRESENT.items() if present()), "")
        method = method or ("addresses" if explicit else "one")
    if method == "one":
        return ProcessStart("one")
    finder = _FINDERS.get(method, lambda *_: ProcessStart(method, "", -1, -1))
    start = dataclasses.replace(finder(settings["coordinator"]), **explicit)
    if unset := [name for name in _FLAGS if getattr(start, name) in ("", -1)]:
        missing = " and ".join(f"--{name} ({_FLAGS[name]})" for name in unset)
        raise ClusterError(
            f"--start={method}: {missing} not given; say where process 0 is (HOST:PORT),"
            " how many processes there are, and which one this is"
        )
    if start.process_id >= start.num_processes:
        raise ClusterError(
            f"--process_id: {start.process_id} is not one of the {start.num_processes} processes;"
            f" they are numbered from 0 to {start.num_processes - 1}"
        )
    if not re.fullmatch(r".+:\d+", start.coordinator):
        raise ClusterError(
            f"--coordinator: {start.coordinator!r} has no port; write HOST:PORT, the port free on"
            " that host"
        )
    return start


def _require(how: str, remedy: str, *names: str) -> None:
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ClusterError(
            f"--start={how}: {', '.join(missing)} not set; {remedy}, or give"
            " --coordinator, --num_processes and --process_id with --start=addresses"
        )


def _env_number(how: str, name: str, default: int = -1) -> int:
    """The number in an environment variable of a launcher; `default` if unset."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ClusterError(f"--start={how}: {name}={text!r} is not a number; correct or unset it")
    return int(text) if text else default


def _slurm(coordinator: str) -> ProcessStart:
    number = functools.partial(_env_number, "slurm")
    remedy = "start the program with srun inside the batch file"
    _require("slurm", remedy, "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    number("SLURM_JOB_ID")  # JAX reads it too, but its error would not name the variable
    tasks = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS"))
    # Largest number of tasks per node: `2(x3),1` is two on three nodes and one on another.
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    processes_per_node = max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", per_node)), default=1)
    device = _local_device(processes_per_node, number("SLURM_LOCALID", 0))
    coordinator = SlurmCluster.get_coordinator_address(None, None)
    return ProcessStart("slurm", coordinator, tasks, number("SLURM_PROCID"), device)


def _local_device(processes_per_node: int, local_id: int) -> int:
    # Under these launchers JAX gives every process one device, even if it is alone on its host. A
    # launcher that makes one GPU visible per process has chosen already.
    visible_devices = os.environ.get(
        "CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", "all,")
    )
    return local_id if processes_per_node > 1 and "," in visible_devices else ALL_DEVICES


def _openmpi(coordinator: str) -> ProcessStart:
    number = functools.partial(_env_number, "openmpi")
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    _require("openmpi", "start the program with mpirun", size, rank)
    if not coordinator and OmpiCluster.is_env_present():
        coordinator = OmpiCluster.get_coordinator_address(None, None)
    if not coordinator:
        raise ClusterError(
            "--start=openmpi: OMPI_MCA_orte_hnp_uri not set (Open MPI 5 does not say where its"
            " first host is); give --coordinator=HOST:PORT of rank 0's host"
        )
    processes_per_node = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    device = _local_device(processes_per_node, number("OMPI_COMM_WORLD_LOCAL_RANK", 0))
    return ProcessStart("openmpi", coordinator, number(size), number(rank), device)


def _jobset(coordinator: str) -> ProcessStart:
    # From the variables set in launch/gke_jobset.yaml: JAX would query Kubernetes, which needs a
    # permission.
    number = functools.partial(_env_number, "jobset")
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "PODS_PER_JOB")
    remedy = "take them over from the pod's annotations as launch/gke_jobset.yaml does"
    _require("jobset", remedy, *names, "NUM_JOBS")
    name, job = os.environ["JOBSET_NAME"], os.environ["REPLICATED_JOB_NAME"]
    per_job, index = number("PODS_PER_JOB"), number("JOB_INDEX", 0)
    return ProcessStart(
        "jobset",
        f"{name}-{job}-0-0.{name}:{_PORT}",
        per_job * number("NUM_JOBS"),
        per_job * index + number("JOB_COMPLETION_INDEX"),
    )


def _tpu(coordinator: str) -> ProcessStart:
    # From GKE's variables or the VM's metadata server. JAX's own detection needs `requests`, and
    # fails with an error of that package where no server answers.
    number = functools.partial(_env_number, "tpu")
    if os.environ.get("TPU_WORKER_HOSTNAMES"):
        _require("tpu", "GKE sets it on TPU node pools", "TPU_WORKER_ID")
        hosts = os.environ["TPU_WORKER_HOSTNAMES"].split(",")
        worker = number("TPU_WORKER_ID")
    else:
        endpoints = _metadata("worker-network-endpoints").split(",")
        # An endpoint is HOST, or NAME:ID:HOST on older VMs.
        hosts = [endpoint.split(":")[-1] for endpoint in endpoints]
        worker = int(_metadata("agent-worker-number"))
    slices = number("MEGASCALE_NUM_SLICES", 1)
    slice_id = number("MEGASCALE_SLICE_ID", 0)
    first = os.environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0] or hosts[0]
    return ProcessStart(
        "tpu", f"{first}:{_PORT}", len(hosts) * slices, worker + slice_id * len(hosts)
    )


def _metadata(key: str) -> str:
    server = os.environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, TimeoutError) as error:
        raise ClusterError(
            f"--start=tpu: neither TPU_WORKER_HOSTNAMES is set nor does {url} answer ({error});"
            " start on every worker of a TPU VM or in a GKE TPU node pool, or use --start=one"
        ) from error


def _on_tpu_machine() -> bool:
    if os.environ.get("JAX_PLATFORMS", "tpu").startswith("cpu"):
        return False
    if os.environ.get("TPU_WORKER_HOSTNAMES"):
        return True
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    ignores_tpu = "TPU_SKIP_MDS_QUERY" in os.environ or importlib.util.find_spec("libtpu") is None
    return bool(chips) and not ignores_tpu


_FINDERS = {"tpu": _tpu, "jobset": _jobset, "slurm": _slurm, "openmpi": _openmpi}
# Whether a launcher's variables are set; the first match wins, as Open MPI may run inside SLURM.
_IS_PRESENT: Mapping[str, Callable[[], bool]] = {
    "tpu": _on_tpu_machine,
    "jobset": lambda: "JOBSET_NAME" in os.environ,
    "openmpi": lambda: "OMPI_COMM_WORLD_SIZE" in os.environ,
    "slurm": lambda: "SLURM_STEP_NODELIST" in os.environ,
}
