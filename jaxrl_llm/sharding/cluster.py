"""How a process, one a host or one a GPU, finds the others: by the launcher or the user's flags."""

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
STARTS = typing.get_args(typing.get_type_hints(ProcessesConfig)["start"])
ALL_DEVICES = -1

_PORT = 8476  # where process 0 is met, unless the launcher's job number chooses one


class ClusterError(UserError, ValueError):
    """The processes of a run cannot find each other; the message names what is missing."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Which process this is, and of how many."""

    how: str  # one of `STARTS`, except "auto"
    coordinator: str = ""  # HOST:PORT of process 0
    num_processes: int = 1
    process_id: int = 0
    local_device: int = ALL_DEVICES  # the one device of its host that this process has


def find(
    how: str = "auto", coordinator: str = "", num_processes: int = -1, process_id: int = -1
) -> Start:
    """Returns which process this is, and of how many.

    Arguments, but for "" and -1, win over `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
    `JAX_PROCESS_ID`; these win over the launcher. "auto" takes the launcher whose variables are
    set; without one, one process. Raises ClusterError if something is missing or contradictory.
    """
    number = functools.partial(_number, "addresses")
    told: dict[str, Any] = {
        "coordinator": coordinator or os.environ.get(_FLAGS["coordinator"], ""),
        "num_processes": num_processes if num_processes >= 0 else number(_FLAGS["num_processes"]),
        "process_id": process_id if process_id >= 0 else number(_FLAGS["process_id"]),
    }
    given = {name: value for name, value in told.items() if value not in ("", -1)}
    if how == "auto":
        how = next((name for name, present in _PRESENT.items() if present()), "")
        how = how or ("addresses" if given else "one")
    if how == "one":
        return Start("one")
    finder = _FINDERS.get(how, lambda *_: Start(how, "", -1, -1))
    start = dataclasses.replace(finder(told["coordinator"]), **given)
    if absent := [name for name in _FLAGS if getattr(start, name) in ("", -1)]:
        missing = " and ".join(f"--{name} ({_FLAGS[name]})" for name in absent)
        raise ClusterError(
            f"--start={how}: {missing} not given; say where process 0 is (HOST:PORT),"
            " how many processes there are, and which one this is"
        )
    if start.process_id >= start.num_processes:
        raise ClusterError(
            f"--process_id: {start.process_id} is none of the {start.num_processes} processes;"
            f" they are numbered from 0 to {start.num_processes - 1}"
        )
    if not re.fullmatch(r".+:\d+", start.coordinator):
        raise ClusterError(
            f"--coordinator: {start.coordinator!r} has no port; write HOST:PORT, the port free on"
            " that host"
        )
    return start


def _need(how: str, remedy: str, *names: str) -> None:
    if missing := [name for name in names if not os.environ.get(name)]:
        raise ClusterError(
            f"--start={how}: {', '.join(missing)} not set; {remedy}, or give"
            " --coordinator, --num_processes and --process_id with --start=addresses"
        )


def _number(how: str, name: str, default: int = -1) -> int:
    """Returns the number in a launcher's variable, the default where it is not set."""
    text = os.environ.get(name, "")
    if text and not text.isdecimal():
        raise ClusterError(f"--start={how}: {name}={text!r} is no number; correct or unset it")
    return int(text) if text else default


def _slurm(coordinator: str) -> Start:
    number = functools.partial(_number, "slurm")
    remedy = "start the program with srun inside the batch file"
    _need("slurm", remedy, "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    number("SLURM_JOB_ID")  # read by jax, which would not name it
    tasks = number("SLURM_STEP_NUM_TASKS", number("SLURM_NTASKS"))
    # The most tasks on a node: `2(x3),1` is two on three nodes and one on another.
    per_node = os.environ.get("SLURM_STEP_TASKS_PER_NODE", "1")
    here = max(map(int, re.findall(r"(\d+)(?:\(x\d+\))?", per_node)), default=1)
    device = _own_device(here, number("SLURM_LOCALID", 0))
    coordinator = SlurmCluster.get_coordinator_address(None, None)
    return Start("slurm", coordinator, tasks, number("SLURM_PROCID"), device)


def _own_device(processes_here: int, local_id: int) -> int:
    # jax gives every process of these launchers one device, even if it is alone on its host. A
    # launcher that shows each process one GPU has chosen already.
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", os.environ.get("ROCR_VISIBLE_DEVICES", "all,"))
    return local_id if processes_here > 1 and "," in shown else ALL_DEVICES


def _openmpi(coordinator: str) -> Start:
    number = functools.partial(_number, "openmpi")
    size, rank = "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"
    _need("openmpi", "start the program with mpirun", size, rank)
    if not coordinator and OmpiCluster.is_env_present():
        coordinator = OmpiCluster.get_coordinator_address(None, None)
    if not coordinator:
        raise ClusterError(
            "--start=openmpi: OMPI_MCA_orte_hnp_uri not set (Open MPI 5 does not say where its"
            " first host is); give --coordinator=HOST:PORT of rank 0's host"
        )
    here = number("OMPI_COMM_WORLD_LOCAL_SIZE", 1)
    device = _own_device(here, number("OMPI_COMM_WORLD_LOCAL_RANK", 0))
    return Start("openmpi", coordinator, number(size), number(rank), device)


def _jobset(coordinator: str) -> Start:
    # By the variables of launch/gke_jobset.yaml; jax would ask Kubernetes, for a permission.
    number = functools.partial(_number, "jobset")
    names = ("JOBSET_NAME", "REPLICATED_JOB_NAME", "JOB_COMPLETION_INDEX", "PODS_PER_JOB")
    remedy = "take them over from the pod's annotations as launch/gke_jobset.yaml does"
    _need("jobset", remedy, *names, "NUM_JOBS")
    name, job = os.environ["JOBSET_NAME"], os.environ["REPLICATED_JOB_NAME"]
    per_job, index = number("PODS_PER_JOB"), number("JOB_INDEX", 0)
    return Start(
        "jobset",
        f"{name}-{job}-0-0.{name}:{_PORT}",
        per_job * number("NUM_JOBS"),
        per_job * index + number("JOB_COMPLETION_INDEX"),
    )


def _tpu(coordinator: str) -> Start:
    # By the variables that GKE sets, or by the machine's metadata. jax's own way needs `requests`,
    # and ends in an error of that package where no server answers.
    number = functools.partial(_number, "tpu")
    if os.environ.get("TPU_WORKER_HOSTNAMES"):
        _need("tpu", "GKE sets it on TPU node pools", "TPU_WORKER_ID")
        hosts = os.environ["TPU_WORKER_HOSTNAMES"].split(",")
        worker = number("TPU_WORKER_ID")
    else:
        endpoints = _metadata("worker-network-endpoints").split(",")
        # An endpoint is a host, or, on older machines, NAME:ID:HOST.
        hosts = [endpoint.split(":")[-1] for endpoint in endpoints]
        worker = int(_metadata("agent-worker-number"))
    slices = number("MEGASCALE_NUM_SLICES", 1)
    slice_id = number("MEGASCALE_SLICE_ID", 0)
    first = os.environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0] or hosts[0]
    return Start("tpu", f"{first}:{_PORT}", len(hosts) * slices, worker + slice_id * len(hosts))


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
    alone = "TPU_SKIP_MDS_QUERY" in os.environ or importlib.util.find_spec("libtpu") is None
    return bool(chips) and not alone


_FINDERS = {"tpu": _tpu, "jobset": _jobset, "slurm": _slurm, "openmpi": _openmpi}
# Whether a launcher's variables are set; the first counts, as Open MPI may run inside SLURM.
_PRESENT: Mapping[str, Callable[[], bool]] = {
    "tpu": _on_tpu_machine,
    "jobset": lambda: "JOBSET_NAME" in os.environ,
    "openmpi": lambda: "OMPI_COMM_WORLD_SIZE" in os.environ,
    "slurm": lambda: "SLURM_STEP_NODELIST" in os.environ,
}
