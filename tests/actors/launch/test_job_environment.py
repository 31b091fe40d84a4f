"""The environments of torchrun, srun and Kubernetes have a node's rank in its cluster."""

import pytest

from asterism.actors.launch.job_environment import NodePlacement, parse_first_node, read_placement
from asterism.configs.errors import UnusableInput

TORCHRUN = {
    **{"TORCHELASTIC_RUN_ID": "none", "RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
    **{"GROUP_RANK": "2", "GROUP_WORLD_SIZE": "4", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
}
BATCH_SCRIPT = {
    **{"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[03-06]", "SLURM_JOB_NUM_NODES": "4", "SLURM_NTASKS": "4"},
    **{"SLURM_TASKS_PER_NODE": "1(x4)", "SLURM_PROCID": "0", "SLURM_NODEID": "0", "SLURM_LOCALID": "0"},
}
SRUN = {
    **BATCH_SCRIPT,
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "node[03-06]",
}
SHELL = {  # variables of `srun --pty bash`; salloc sets the step id 4294967290 instead
    **BATCH_SCRIPT,
    "SLURM_NTASKS": "8",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node03",
}
POD = {"JOB_COMPLETION_INDEX": "1", "ASTERISM_NODES": "2", "ASTERISM_HEAD": "asterism-0.asterism"}


def read_error(environment: dict[str, str]) -> str:
    with pytest.raises(UnusableInput) as caught:
        read_placement(environment)
    return str(caught.value)


def without(environment: dict[str, str], name: str) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key != name}


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1"},  # variables set by hand for another program
        BATCH_SCRIPT,
        SHELL,
        {**SHELL, "SLURM_STEP_ID": "4294967290"},
        {**TORCHRUN, "GROUP_RANK": "0", "WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1"},
        {"JOB_COMPLETION_INDEX": "5", "ASTERISM_NODES": "1"},
    ],
    ids=["nothing", "ranks by hand", "batch script", "srun shell", "salloc shell", "single torchrun", "sweep"],
)
def test_a_single_process_has_no_placement(environment: dict[str, str]):
    assert read_placement(environment) is None


def test_each_launcher_gives_the_rank_the_number_of_nodes_and_the_host_of_rank_0():
    assert read_placement(TORCHRUN) == NodePlacement(2, 4, "10.0.0.1", "torchrun")
    assert read_placement(SRUN) == NodePlacement(3, 4, "node03", "srun")
    assert read_placement(POD) == NodePlacement(1, 2, "asterism-0.asterism", "kubernetes")


def test_the_innermost_of_several_launchers_counts():
    assert read_placement({**POD, **SRUN, **TORCHRUN}) == read_placement(TORCHRUN)
    assert read_placement({**POD, **SRUN}) == read_placement(SRUN)


def test_a_step_on_fewer_nodes_than_its_job_is_a_separate_cluster():
    step = {"SLURM_STEP_NODELIST": "node[05-06]", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "2"}
    assert read_placement({**SRUN, **step, "SLURM_PROCID": "1"}) == NodePlacement(1, 2, "node05", "srun")


def test_several_processes_on_a_node_are_refused_with_the_flag_that_helps():
    error = read_error({**TORCHRUN, "WORLD_SIZE": "32", "LOCAL_WORLD_SIZE": "8"})
    assert "32 processes on 4 nodes" in error
    assert error.endswith("torchrun --nproc-per-node 1")
    elsewhere = {**TORCHRUN, "WORLD_SIZE": "11"}  # one process here, eight on another node
    assert read_error(elsewhere).endswith("torchrun --nproc-per-node 1")
    assert read_error({**TORCHRUN, "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"})
    error = read_error({**SRUN, "SLURM_STEP_NUM_TASKS": "32"})
    assert "32 tasks on 4 nodes" in error
    assert error.endswith("srun --ntasks-per-node=1")


@pytest.mark.parametrize(
    ("environment", "name"),
    [
        *[(TORCHRUN, name) for name in ("GROUP_RANK", "GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE", "WORLD_SIZE")],
        *[(SRUN, name) for name in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NUM_NODES")],
        *[(POD, name) for name in ("JOB_COMPLETION_INDEX", "ASTERISM_NODES")],
    ],
)
def test_an_invalid_number_is_named_with_its_variable_and_value(environment: dict[str, str], name: str):
    for value in ("", "two", "-1", "1.5", " 1", "\u0663"):
        assert read_error({**environment, name: value}) == f"{name}={value}: expected a number"
    if not name.endswith(("RANK", "PROCID", "INDEX")):
        assert read_error({**environment, name: "0"}) == f"{name}=0: expected a positive number"
    if name != "JOB_COMPLETION_INDEX":
        assert read_error(without(environment, name)).startswith(f"{name} is missing from the environment")


def test_a_missing_host_is_named():
    for environment, name in ((TORCHRUN, "MASTER_ADDR"), (SRUN, "SLURM_STEP_NODELIST"), (POD, "ASTERISM_HEAD")):
        assert read_error(without(environment, name)).startswith(f"{name} is missing from the environment")
    assert "JOB-0.SERVICE" in read_error(without(POD, "ASTERISM_HEAD"))
    assert "the host of rank 0 has no name" in read_error({**POD, "ASTERISM_HEAD": ""})


def test_a_rank_beyond_the_last_node_is_refused():
    assert "rank 2 is out of range for 2 nodes" in read_error({**POD, "JOB_COMPLETION_INDEX": "2"})


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
def test_the_first_node_of_slurms_list_is_parsed(nodes: str, first: str):
    assert parse_first_node(nodes) == first


@pytest.mark.parametrize("nodes", ["", ",node1", "node[03-07", "node]1", "node[]", "node[a-b]", "node[1-]", "a b"])
def test_an_invalid_node_list_is_refused(nodes: str):
    with pytest.raises(UnusableInput, match="expected a list of nodes"):
        parse_first_node(nodes)
