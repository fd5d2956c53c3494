"""Which process of how many: by the variables of every launcher."""

import http.server
import os
import threading
from unittest import mock

import pytest

from jaxrl_llm.sharding import cluster_detection
from jaxrl_llm.sharding.cluster_detection import ALL_DEVICES, ClusterError, ProcessStart

SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "node[007-010,020]",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_NTASKS": "32",
    "SLURM_STEP_TASKS_PER_NODE": "4(x4)",
    "SLURM_PROCID": "6",
    "SLURM_LOCALID": "2",
}
OPENMPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
GKE_TPU = {"TPU_WORKER_HOSTNAMES": "a,b,c,d", "TPU_WORKER_ID": "2"}


def find(environ, *args, **told):
    with mock.patch.dict(os.environ, environ, clear=True):
        return cluster_detection.detect_start(*args, **told)


def test_alone_without_a_launcher():
    assert find({}) == ProcessStart("one")
    assert find(SLURM, "one") == ProcessStart("one")
    # An allocation without srun starts one process.
    assert find({"SLURM_JOB_ID": "4100", "SLURM_NTASKS": "16"}) == ProcessStart("one")


def test_slurm_with_a_process_for_each_gpu():
    # 61440 + 4100 modulo 4096.
    assert find(SLURM) == ProcessStart("slurm", "node007:61444", 16, 6, local_device=2)


def test_slurm_with_a_process_for_each_node():
    start = find({**SLURM, "SLURM_STEP_TASKS_PER_NODE": "1(x4)"})
    assert start.local_device == ALL_DEVICES


def test_gpu_chosen_by_the_launcher_is_kept():
    assert find({**SLURM, "CUDA_VISIBLE_DEVICES": "3"}).local_device == ALL_DEVICES
    assert find({**SLURM, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}).local_device == 2


@pytest.mark.parametrize(
    "nodes, first",
    [
        ("node1", "node1"),
        ("node1,node2", "node1"),
        ("n[1-3]", "n1"),
        ("n[03,05-09],m1", "n03"),
        ("rack2-node[4-5]", "rack2-node4"),
    ],
)
def test_the_first_host_of_a_node_list(nodes, first):
    start = find({**SLURM, "SLURM_STEP_NODELIST": nodes})
    assert start.coordinator == f"{first}:61444"


def test_open_mpi_variables_are_detected():
    # 1531576320 is 373920 times 4096; 373920 modulo 4096 is 1184.
    assert find(OPENMPI) == ProcessStart("openmpi", "10.96.0.1:62624", 4, 3)


def test_open_mpi_without_the_address_of_its_first_host():
    environ = {k: v for k, v in OPENMPI.items() if "hnp" not in k}
    with pytest.raises(ClusterError, match=r"OMPI_MCA_orte_hnp_uri not set.*--coordinator"):
        find(environ)
    start = find(environ, coordinator="head:1234")
    assert start == ProcessStart("openmpi", "head:1234", 4, 3)


def test_tpu_on_gke_one_slice_and_several():
    assert find(GKE_TPU) == ProcessStart("tpu", "a:8476", 4, 2)
    several = {
        **GKE_TPU,
        "MEGASCALE_NUM_SLICES": "3",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "first:8080",
    }
    assert find(several) == ProcessStart("tpu", "first:8476", 12, 6)
    assert find({**GKE_TPU, "JAX_PLATFORMS": "cpu"}) == ProcessStart("one")


@pytest.mark.parametrize("endpoints", ["10.0.0.4,10.0.0.5", "w:0:10.0.0.4,w:1:10.0.0.5"])
def test_tpu_pod_by_its_metadata(endpoints):
    class Metadata(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            answers = {"worker-network-endpoints": endpoints, "agent-worker-number": "1"}
            found = answers[self.path.rpartition("/")[2]]
            assert self.headers["Metadata-Flavor"] == "Google"
            self.send_response(200)
            self.end_headers()
            self.wfile.write(found.encode())

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("localhost", 0), Metadata) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        environ = {"GCE_METADATA_IP": f"localhost:{server.server_port}"}
        assert find(environ, "tpu") == ProcessStart("tpu", "10.0.0.4:8476", 2, 1)
        server.shutdown()


def test_missing_metadata_is_reported():
    with pytest.raises(ClusterError, match=r"neither TPU_WORKER_HOSTNAMES is set nor does http"):
        find({"GCE_METADATA_IP": "localhost:1"}, "tpu")


def test_addresses_from_flags_and_environment():
    environ = {"JAX_COORDINATOR_ADDRESS": "h:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert find(environ) == ProcessStart("addresses", "h:1", 2, 1)
    assert find(environ, "auto", "g:2", 3, 0) == ProcessStart("addresses", "g:2", 3, 0)


@pytest.mark.parametrize(
    "told, missing",
    [
        (("h:1",), r"--num_processes \(JAX_NUM_PROCESSES\) and --process_id"),
        (("h:1", 2), r"--start=addresses: --process_id \(JAX_PROCESS_ID\) not given"),
        (("", 2, 0), r"--coordinator \(JAX_COORDINATOR_ADDRESS\) not given"),
        (("h:1", 2, 2), "2 is not one of the 2 processes; they are numbered from 0 to 1"),
        (("h", 2, 1), "'h' has no port"),
    ],
)
def test_missing_variables_are_named(told, missing):
    with pytest.raises(ClusterError, match=missing):
        find({}, "auto", *told)


@pytest.mark.parametrize(
    "how, environ, missing",
    [
        ("slurm", {}, "SLURM_JOB_ID, SLURM_STEP_NODELIST, SLURM_PROCID not set; start.* srun"),
        ("jobset", {"JOBSET_NAME": "a"}, "REPLICATED_JOB_NAME, .*launch/gke_jobset.yaml"),
        ("openmpi", {}, "OMPI_COMM_WORLD_SIZE, OMPI_COMM_WORLD_RANK not set; .*mpirun"),
        ("tpu", {"TPU_WORKER_HOSTNAMES": "a"}, "TPU_WORKER_ID not set"),
        ("slurm", {**SLURM, "SLURM_PROCID": "six"}, "SLURM_PROCID='six' is not a number"),
    ],
)
def test_a_launcher_that_is_not_there_is_an_error(how, environ, missing):
    with pytest.raises(ClusterError, match=missing):
        find(environ, how)
