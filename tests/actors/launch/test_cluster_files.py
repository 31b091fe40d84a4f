"""The files of docs/cluster.md start a cluster: the Slurm script, the manifest, and the torchrun command."""

import itertools
import os
import re
import shlex
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from asterism.actors.launch.job_environment import NodePlacement, read_placement
from asterism.configs.load import load_run
from asterism.configs.schema.run_config import RunConfig

DOCS = Path(__file__).parents[3] / "docs"
SBATCH = DOCS / "cluster" / "run.sbatch"
MANIFEST = DOCS / "cluster" / "job.yaml"
GUIDE = (DOCS / "cluster.md").read_text()


def check_syntax(script: str) -> None:
    """Parse the script with bash without running it."""
    assert subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True).stderr == ""


def parse_overrides(arguments: list[str]) -> RunConfig:
    """Return the configuration that results from these arguments of `asterism run`."""
    overrides = [value for flag, value in itertools.pairwise(arguments) if flag == "--set"]
    return load_run(None, overrides)


def write_command(folder: Path, name: str) -> None:
    """Create a command that prints its arguments."""
    path = folder / name
    path.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    path.chmod(0o755)


class TestSlurm:
    def submit(self, folder: Path, *arguments: str, script: Path = SBATCH) -> subprocess.CompletedProcess[str]:
        """Run the script as Slurm does, in a job of three nodes, with an srun that prints its arguments."""
        write_command(folder, "srun")
        job = {"SLURM_JOB_NUM_NODES": "3", "SLURM_CPUS_PER_TASK": "16", "HOME": "/home/user"}
        path = f"{folder}{os.pathsep}{os.environ['PATH']}"
        return subprocess.run(
            ["bash", str(script), *arguments], env={"PATH": path, **job}, cwd=folder, text=True, capture_output=True
        )

    def test_the_script_parses_in_bash(self):
        check_syntax(SBATCH.read_text())

    def test_the_script_starts_one_task_per_node_and_configures_the_number_of_nodes(self, tmp_path: Path):
        arguments_seen = self.submit(
            tmp_path, "configs/tiny.toml", "first", "--set", "learner.optimizer.lr=2e-4"
        ).stdout.splitlines()
        program = arguments_seen.index(".venv/bin/asterism")
        assert {"--ntasks-per-node=1", "--cpus-per-task=16"} < set(arguments_seen[:program])
        assert arguments_seen[program + 1 : program + 3] == ["run", "configs/tiny.toml"]
        run = parse_overrides(arguments_seen[program:])
        assert (run.name, run.runs_folder, run.learner.optimizer.lr) == ("first", f"{tmp_path}/runs", 2e-4)
        assert (run.cluster.nodes, run.cluster.key) == (3, "/home/user/.asterism/cluster.key")

    def test_the_script_resumes_an_existing_run(self, tmp_path: Path):
        assert "--resume" not in self.submit(tmp_path, "a.toml", "first").stdout.splitlines()
        (tmp_path / "runs" / "first").mkdir(parents=True)
        (tmp_path / "runs" / "first" / "config.toml").touch()
        assert "--resume" in self.submit(tmp_path, "a.toml", "first").stdout.splitlines()

    def test_a_missing_name_is_reported(self, tmp_path: Path):
        refused = self.submit(tmp_path, "configs/tiny.toml")
        assert refused.returncode != 0
        assert "NAME is missing: sbatch" in refused.stderr


class TestKubernetes:
    @pytest.fixture
    def objects(self) -> dict[str, Any]:
        return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}

    @pytest.fixture
    def pod(self, objects: dict[str, Any]) -> dict[str, Any]:
        return objects["Job"]["spec"]["template"]["spec"]

    @pytest.fixture
    def environment(self, pod: dict[str, Any]) -> dict[str, str]:
        return {each["name"]: each["value"] for each in pod["containers"][0]["env"]}

    def test_each_pods_rank_is_its_completion_index(self, objects: dict[str, Any], environment: dict[str, str]):
        job = objects["Job"]
        assert job["spec"]["completionMode"] == "Indexed"
        head = f"{job['metadata']['name']}-0.{objects['Service']['metadata']['name']}"
        pods = job["spec"]["completions"]
        assert job["spec"]["parallelism"] == pods
        for index in range(pods):
            pod = environment | {"JOB_COMPLETION_INDEX": str(index)}
            assert read_placement(pod) == NodePlacement(index, pods, head, "kubernetes")

    def test_pods_have_host_names_from_a_headless_service(self, objects: dict[str, Any], pod: dict[str, Any]):
        service, job = objects["Service"], objects["Job"]
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
        assert pod["subdomain"] == service["metadata"]["name"]

    def test_all_mounted_volumes_exist(self, objects: dict[str, Any], pod: dict[str, Any]):
        volumes = {each["name"]: each for each in pod["volumes"]}
        mounts = {each["mountPath"]: volumes[each["name"]] for each in pod["containers"][0]["volumeMounts"]}
        claim = objects["PersistentVolumeClaim"]
        assert mounts["/runs"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
        assert mounts["/dev/shm"]["emptyDir"]["medium"] == "Memory"
        secret = mounts["/etc/asterism"]["secret"]["secretName"]
        assert f"kubectl create secret generic {secret} --from-file=cluster.key" in GUIDE

    def test_the_command_has_a_node_per_pod(self, tmp_path: Path, pod: dict[str, Any], environment: dict[str, str]):
        container = pod["containers"][0]
        for name in ("asterism", "install", "getent"):
            write_command(tmp_path, name)
        arguments_seen = subprocess.run(
            [*container["command"], *container["args"]],
            env=environment | {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
            text=True,
            capture_output=True,
            check=True,
        ).stdout.splitlines()
        copied, program = arguments_seen.index("/etc/asterism/cluster.key"), arguments_seen.index("run")
        run = parse_overrides(arguments_seen[program:])
        assert arguments_seen[program + 1] == environment["CONFIG"]
        assert (run.name, run.runs_folder) == (environment["NAME"], "/runs")
        assert (run.cluster.nodes, run.cluster.key) == (int(environment["ASTERISM_NODES"]), arguments_seen[copied + 1])
        assert load_run(DOCS.parent / environment["CONFIG"])


class TestGuide:
    def test_the_commands_parse_in_bash(self):
        blocks = re.findall(r"(?:^    .*\n)+", GUIDE, flags=re.MULTILINE)
        shell = [block for block in blocks if re.match(r" +(\.venv|cd|for|kubectl)", block)]
        assert len(shell) == 5
        for block in shell:
            check_syntax(block)

    def test_every_override_in_the_commands_is_a_configuration_key(self):
        overrides = re.findall(r"--set ([a-z_.]+=[^\s`]+)", GUIDE)
        assert len(overrides) > 6
        assert load_run(None, ["name=a", *overrides]).cluster.nodes == 4

    def test_the_table_of_keys_matches_the_schema(self):
        table = re.search(r"(?:^    [a-z_]+ = .*\n)+", GUIDE, flags=re.MULTILINE)
        assert table
        cluster = RunConfig(name="a").cluster
        assert tomllib.loads(table[0]) == {name: getattr(cluster, name) for name in cluster.__struct_fields__}

    @pytest.mark.slow
    def test_the_torchrun_command_gives_each_node_a_rank(self):
        line = re.search(r"torchrun (--nnodes 4 .*?)\\\n", GUIDE)
        assert line
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            endpoint = f"127.0.0.1:{free.getsockname()[1]}"
        flags = shlex.split(line[1].replace("--nnodes 4", "--nnodes 2").replace("10.0.0.1:29400", endpoint))
        torchrun = [sys.executable, "-m", "torch.distributed.run", *flags, "env", "-0"]
        nodes = [subprocess.Popen(torchrun, stdout=subprocess.PIPE, text=True) for _ in range(2)]
        printed = [node.communicate()[0] for node in nodes]
        environments = [dict(entry.split("=", 1) for entry in each.split("\0") if "=" in entry) for each in printed]
        head = environments[0]["MASTER_ADDR"]
        placements = [read_placement(environment) for environment in environments]
        assert sorted(placement for placement in placements if placement) == [
            NodePlacement(rank, 2, head, "torchrun") for rank in (0, 1)
        ]
