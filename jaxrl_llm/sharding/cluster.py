"""How this process finds the others of its run: read from the environment, or as told.

One process a host, or one a GPU; every launcher says in its own variables how many there are,
which of them this one is, and where the first is. Nothing is started here, see `hosts.py`.
"""

import dataclasses
import glob
import importlib.util
import re
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping

from jaxrl_llm.errors import UserError

STARTS = ("auto", "one", "addresses", "slurm", "jobset", "tpu", "openmpi")
ALL_DEVICES = -1

_PORT = 8476  # where process 0 is met, unless the launcher's job number chooses one
_METADATA_TIMEOUT_S = 10.0


class ClusterError(UserError, ValueError):
    """The processes of a run cannot find each other; the message names what is missing."""


@dataclasses.dataclass(frozen=True)
class Start:
    """Which process of how many this is."""

    how: str  # one of `STARTS`, except "auto"
    coordinator: str = ""  # HOST:PORT of process 0
    num_processes: int = 1
    process_id: int = 0
    local_device: int = ALL_DEVICES  # the one device of its host that this process has


@dataclasses.dataclass(frozen=True)
class Address:
    """What the user says of the processes; "" and -1 are left to the launcher."""

    coordinator: str = ""
    num_processes: int = -1
    process_id: int = -1


def find(environ: Mapping[str, str], how: str = "auto", told: Address = Address()) -> Start:
    """Returns which process of how many this is.

    Args:
      environ: Environment variables. `JAX_COORDINATOR_ADDRESS`, `JAX_NUM_PROCESSES` and
        `JAX_PROCESS_ID` say what `told` leaves open.
      how: One of `STARTS`; "auto" takes the launcher whose variables are there, and one process
        where there is none.
      told: What the user says; wins over the launcher.

    Raises:
      ClusterError: If something is missing or contradicts itself; names it.
    """
    told = _with_environment(told, environ)
    if how == "auto":
        how = next((name for name, present in _PRESENT.items() if present(environ)), "")
        how = how or ("one" if told == Address() else "addresses")
    if how == "one":
        return Start("one")
    found = _FINDERS[how](environ, told) if how in _FINDERS else Start(how, "", -1, -1)
    start = dataclasses.replace(
        found,
        coordinator=told.coordinator or found.coordinator,
        num_processes=told.num_processes if told.num_processes >= 0 else found.num_processes,
        process_id=told.process_id if told.process_id >= 0 else found.process_id,
    )
    missing = [
        flag
        for flag, absent in (
            ("--coordinator (JAX_COORDINATOR_ADDRESS)", not start.coordinator),
            ("--num_processes (JAX_NUM_PROCESSES)", start.num_processes < 0),
            ("--process_id (JAX_PROCESS_ID)", start.process_id < 0),
        )
        if absent
    ]
    if missing:
        raise ClusterError(
            f"--start={how}: {' and '.join(missing)} not given; say where process 0 is (HOST:PORT),"
            " how many processes there are, and which one this is"
        )
    if not 0 <= start.process_id < start.num_processes:
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


def _with_environment(told: Address, environ: Mapping[str, str]) -> Address:
    def number(given: int, variable: str) -> int:
        return given if given >= 0 else _number(environ, variable, "addresses", -1)

    return Address(
        told.coordinator or environ.get("JAX_COORDINATOR_ADDRESS", ""),
        number(told.num_processes, "JAX_NUM_PROCESSES"),
        number(told.process_id, "JAX_PROCESS_ID"),
    )


def _need(environ: Mapping[str, str], how: str, remedy: str, *variables: str) -> None:
    if missing := [name for name in variables if not environ.get(name)]:
        raise ClusterError(
            f"--start={how}: {', '.join(missing)} not set; {remedy}, or give --coordinator,"
            " --num_processes and --process_id with --start=addresses"
        )


def _number(environ: Mapping[str, str], name: str, how: str, default: int) -> int:
    text = environ.get(name, "")
    if text and not text.isdecimal():
        raise ClusterError(f"--start={how}: {name}={text!r} is no number; correct or unset it")
    return int(text) if text else default


# SLURM.


def _slurm(environ: Mapping[str, str], told: Address) -> Start:
    remedy = "start the program with srun inside the batch file"
    _need(environ, "slurm", remedy, "SLURM_JOB_ID", "SLURM_STEP_NODELIST", "SLURM_PROCID")
    tasks = _number(environ, "SLURM_NTASKS", "slurm", -1)
    tasks = _number(environ, "SLURM_STEP_NUM_TASKS", "slurm", tasks)
    # Jobs that share a node must not meet at one port.
    port = 61440 + _number(environ, "SLURM_JOB_ID", "slurm", 0) % 4096
    here = _tasks_on_this_node(environ)
    return Start(
        "slurm",
        f"{first_host(environ['SLURM_STEP_NODELIST'])}:{port}",
        tasks,
        _number(environ, "SLURM_PROCID", "slurm", -1),
        _own_device(environ, here, _number(environ, "SLURM_LOCALID", "slurm", 0)),
    )


def first_host(nodelist: str) -> str:
    """Returns the first host of SLURM's notation.

    >>> first_host("gpu[007-015,020],login1"), first_host("tpu3,tpu5")
    ('gpu007', 'tpu3')
    """
    match = re.match(r"([^,\[]+)(?:\[([^\],-]+))?", nodelist)
    return f"{match[1]}{match[2] or ''}" if match else ""


def _tasks_on_this_node(environ: Mapping[str, str]) -> int:
    """Returns the most tasks on a node: `2(x3),1` is two on three nodes and one on another."""
    counts = re.findall(r"(\d+)(?:\(x\d+\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", "1"))
    return max(map(int, counts), default=1)


def _own_device(environ: Mapping[str, str], processes_here: int, local_id: int) -> int:
    """Returns the device of a process that shares its host with others.

    A launcher that shows each process one GPU has chosen already.
    """
    shown = environ.get("CUDA_VISIBLE_DEVICES", environ.get("ROCR_VISIBLE_DEVICES", "all,of,them"))
    return local_id if processes_here > 1 and "," in shown else ALL_DEVICES


# Open MPI.


def _openmpi(environ: Mapping[str, str], told: Address) -> Start:
    remedy = "start the program with mpirun"
    _need(environ, "openmpi", remedy, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK")
    uri = environ.get("OMPI_MCA_orte_hnp_uri", "")
    address = re.search(r"tcp://([^,:]+)|tcp6://\[([^,\]]+)", uri)
    job = re.match(r"\d+", uri)
    coordinator = ""
    if address:
        # The job's number is a multiple of 4096; jobs that share a host must not share the port.
        port = 61440 + (int(job[0]) // 4096 if job else 0) % 4096
        coordinator = f"{address[1] or address[2]}:{port}"
    elif not told.coordinator:
        raise ClusterError(
            "--start=openmpi: OMPI_MCA_orte_hnp_uri not set (Open MPI 5 does not say where its"
            " first host is); give --coordinator=HOST:PORT of rank 0's host"
        )
    here = _number(environ, "OMPI_COMM_WORLD_LOCAL_SIZE", "openmpi", 1)
    return Start(
        "openmpi",
        coordinator,
        _number(environ, "OMPI_COMM_WORLD_SIZE", "openmpi", -1),
        _number(environ, "OMPI_COMM_WORLD_RANK", "openmpi", -1),
        _own_device(environ, here, _number(environ, "OMPI_COMM_WORLD_LOCAL_RANK", "openmpi", 0)),
    )


# GKE.


def _jobset(environ: Mapping[str, str], told: Address) -> Start:
    _need(
        environ,
        "jobset",
        "take them over from the pod's annotations as launch/gke_jobset.yaml does",
        "JOBSET_NAME",
        "REPLICATED_JOB_NAME",
        "JOB_COMPLETION_INDEX",
        "PODS_PER_JOB",
        "NUM_JOBS",
    )
    name, per_job = environ["JOBSET_NAME"], _number(environ, "PODS_PER_JOB", "jobset", 1)
    job = _number(environ, "JOB_INDEX", "jobset", 0)
    return Start(
        "jobset",
        f"{name}-{environ['REPLICATED_JOB_NAME']}-0-0.{name}:{_PORT}",
        per_job * _number(environ, "NUM_JOBS", "jobset", 1),
        per_job * job + _number(environ, "JOB_COMPLETION_INDEX", "jobset", 0),
    )


# TPU.


def _tpu(environ: Mapping[str, str], told: Address) -> Start:
    """One process a TPU host: by the variables that GKE sets, or by the machine's metadata."""
    if environ.get("TPU_WORKER_HOSTNAMES"):
        _need(environ, "tpu", "GKE sets it on TPU node pools", "TPU_WORKER_ID")
        hosts = environ["TPU_WORKER_HOSTNAMES"].split(",")
        worker = _number(environ, "TPU_WORKER_ID", "tpu", -1)
    else:
        endpoints = _metadata(environ, "worker-network-endpoints").split(",")
        # An endpoint is a host, or, on older machines, NAME:ID:HOST.
        hosts = [endpoint.split(":")[-1] for endpoint in endpoints]
        worker = int(_metadata(environ, "agent-worker-number"))
    slices = _number(environ, "MEGASCALE_NUM_SLICES", "tpu", 1)
    slice_id = _number(environ, "MEGASCALE_SLICE_ID", "tpu", 0)
    first = environ.get("MEGASCALE_COORDINATOR_ADDRESS", "").split(":")[0] or hosts[0]
    return Start("tpu", f"{first}:{_PORT}", len(hosts) * slices, worker + slice_id * len(hosts))


def _metadata(environ: Mapping[str, str], key: str) -> str:
    server = environ.get("GCE_METADATA_IP", "metadata.google.internal")
    url = f"http://{server}/computeMetadata/v1/instance/attributes/{key}"
    request = urllib.request.Request(url, headers={"Metadata-Flavor": "Google"})
    try:
        with urllib.request.urlopen(request, timeout=_METADATA_TIMEOUT_S) as answer:
            return answer.read().decode().strip()
    except (urllib.error.URLError, TimeoutError) as error:
        raise ClusterError(
            f"--start=tpu: neither TPU_WORKER_HOSTNAMES is set nor does {url} answer ({error});"
            " start on every worker of a TPU VM or in a GKE TPU node pool, or use --start=one"
        ) from error


def _on_tpu_machine(environ: Mapping[str, str]) -> bool:
    if environ.get("JAX_PLATFORMS", "tpu").startswith("cpu"):
        return False
    if environ.get("TPU_WORKER_HOSTNAMES"):
        return True
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    alone = "TPU_SKIP_MDS_QUERY" in environ or importlib.util.find_spec("libtpu") is None
    return bool(chips) and not alone


_FINDERS: Mapping[str, Callable[[Mapping[str, str], Address], Start]] = {
    "tpu": _tpu,
    "jobset": _jobset,
    "slurm": _slurm,
    "openmpi": _openmpi,
}
# By what a launcher is known, most particular first: Open MPI may run inside of SLURM.
_PRESENT: Mapping[str, Callable[[Mapping[str, str]], bool]] = {
    "tpu": _on_tpu_machine,
    "jobset": lambda environ: "JOBSET_NAME" in environ,
    "openmpi": lambda environ: "OMPI_COMM_WORLD_SIZE" in environ,
    "slurm": lambda environ: "SLURM_STEP_NODELIST" in environ,
}
