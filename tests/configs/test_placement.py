"""Where a process is in a cluster, by the environments that torchrun, srun and Kubernetes give it."""

from __future__ import annotations

import pytest

from configs.errors import UnusableInput
from configs.placement import Place, first_node, place_of

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none",
    "RANK": "2",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "2",
    "GROUP_WORLD_SIZE": "4",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}
BATCH_SCRIPT = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NODELIST": "node[03-06]",
    "SLURM_JOB_NUM_NODES": "4",
    "SLURM_NTASKS": "4",
    "SLURM_TASKS_PER_NODE": "1(x4)",
    "SLURM_PROCID": "0",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "node[03-06]",
}
SHELL = {  # of `srun --pty bash`; that of `salloc` has the step 4294967290
    **BATCH_SCRIPT,
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node03",
}
POD = {"JOB_COMPLETION_INDEX": "1", "ASTERISM_NODES": "2", "ASTERISM_HEAD": "asterism-0.asterism"}


def complaint(environment: dict[str, str]) -> str:
    with pytest.raises(UnusableInput) as caught:
        place_of(environment)
    return str(caught.value)


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},  # set by hand, for another program
        BATCH_SCRIPT,
        SHELL,
        {**SHELL, "SLURM_STEP_ID": "4294967290"},
        {**TORCHRUN, "GROUP_RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "5", "ASTERISM_NODES": "1"},
    ],
    ids=["nothing", "ranks by hand", "batch script", "srun shell", "salloc shell", "torchrun alone", "sweep"],
)
def test_a_process_that_is_alone_is_placed_by_nobody(environment: dict[str, str]):
    assert place_of(environment) is None


def test_each_launcher_tells_the_rank_the_number_of_nodes_and_the_host_of_rank_0():
    assert place_of(TORCHRUN) == Place(2, 4, "10.0.0.1", "torchrun")
    assert place_of(SRUN) == Place(3, 4, "node03", "srun")
    assert place_of(POD) == Place(1, 2, "asterism-0.asterism", "kubernetes")


def test_of_several_launchers_the_innermost_counts():
    assert place_of({**POD, **SRUN, **TORCHRUN}) == place_of(TORCHRUN)
    assert place_of({**POD, **SRUN}) == place_of(SRUN)


def test_a_step_on_fewer_nodes_than_the_job_has_is_its_own_cluster():
    step = {"SLURM_STEP_NODELIST": "node[05-06]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    assert place_of({**SRUN, **step, "SLURM_PROCID": "1"}) == Place(1, 2, "node05", "srun")


def test_several_processes_on_a_node_are_refused_with_the_flag_that_helps():
    said = complaint({**TORCHRUN, "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"})
    assert "32 processes on 4 nodes" in said
    assert said.endswith("torchrun --nproc-per-node 1")
    elsewhere = {**TORCHRUN, "WORLD_SIZE": "11"}  # one here, eight on another node
    assert complaint(elsewhere).endswith("torchrun --nproc-per-node 1")
    assert complaint({**TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"})
    said = complaint({**SRUN, "SLURM_STEP_NUM_TASKS": "32"})
    assert "32 tasks on 4 nodes" in said
    assert said.endswith("srun --ntasks-per-node=1")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        *[(TORCHRUN, name) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")],
        *[(SRUN, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")],
        *[(POD, name) for name in ("JOB_COMPLETION_INDEX", "ASTERISM_NODES")],
    ],
)
def test_a_bad_number_is_named_with_its_variable_and_value(environment: dict[str, str], name: str):
    for value in ("", "two", "-1", "1.5", " 1", "\u0663"):
        assert complaint({**environment, name: value}) == f"{name}={value}: expected a number"
    if not name.endswith(("RANK", "PROCID", "INDEX")):
        assert complaint({**environment, name: "0"}) == f"{name}=0: expected a positive number"
    if name != "JOB_COMPLETION_INDEX":
        assert complaint(without(environment, name)).startswith(f"{name} is missing from the environment")


def test_a_missing_host_is_named():
    for environment, name in ((TORCHRUN, "MASTER_ADDR"), (SRUN, "SLURM_STEP_NODELIST"), (POD, "ASTERISM_HEAD")):
        assert complaint(without(environment, name)).startswith(f"{name} is missing from the environment")
    assert "JOB-0.SERVICE" in complaint(without(POD, "ASTERISM_HEAD"))
    assert "the host of rank 0 has no name" in complaint({**POD, "ASTERISM_HEAD": ""})


def test_a_rank_beyond_the_last_node_is_refused():
    assert "number 2, from 0, of 2" in complaint({**POD, "JOB_COMPLETION_INDEX": "2"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node3", "node3"),
        ("node-a.example,node-b", "node-a.example"),
        ("node[03-07,09],gpu1", "node03"),
        ("node[9,11-12]", "node9"),
        ("gpu1,node[03-07]", "gpu1"),
        ("rack[2,4]node[001-128]", "rack2node001"),
        ("n[0-1]-ib", "n0-ib"),
    ],
)
def test_the_first_node_of_slurms_list(nodes: str, first: str):
    assert first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",node1", "node[03-07", "node]1", "node[]", "node[a-b]", "node[1-]", "a b"])
def test_what_is_no_list_of_nodes_is_refused(nodes: str):
    with pytest.raises(UnusableInput, match="expected a list of nodes"):
        first_node(nodes)
