"""asterism doctor: each lack is found, told apart from its neighbours, and comes with a remedy."""

from __future__ import annotations

import importlib.metadata
import io
import json
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import structlog
from rich.console import Console
from typer.testing import CliRunner

from actors import doctor
from actors.cli import app
from actors.finding import Finding, Status, findings_table
from sandbox import docker_probe
from sandbox.contract import Isolation
from sandbox.docker_probe import DockerTrial, try_docker

NAMES = [
    *("Python", "torch", "uvloop", "CPU", "cores", "memory", "GPU"),
    *("Docker engine", "sandbox", "shared memory", "open files", "disk", "SGLang"),
]


def text_of(findings: list[Finding]) -> str:
    console = Console(file=io.StringIO(), width=100)
    console.print(findings_table(findings))
    return console.file.getvalue()  # type: ignore[attr-defined]


class TestExamination:
    @pytest.mark.slow
    def test_this_machine_is_examined_in_full_and_every_lack_has_a_remedy(self, tmp_path: Path):
        findings = doctor.examine(tmp_path)
        assert [finding.name for finding in findings] == NAMES
        assert all(finding.detail for finding in findings)
        assert [bool(finding.remedy) for finding in findings] == [finding.status != "ok" for finding in findings]

    @pytest.mark.slow
    def test_a_check_that_breaks_becomes_a_warning_and_the_others_are_still_made(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        def breaks(*_: object) -> Finding:
            raise RuntimeError("odd machine")

        monkeypatch.setattr(doctor, "check_cpu", breaks)
        findings = {finding.name: finding for finding in doctor.examine(tmp_path)}
        assert list(findings) == NAMES
        assert findings["CPU"].status == "warning"
        assert findings["CPU"].detail == "could not be examined: RuntimeError: odd machine"

    def test_the_table_shows_status_name_detail_and_remedy_and_takes_no_markup_from_the_machine(self):
        shown = text_of([Finding("disk", "warning", "1 GiB in /a[b]c", "Delete [old] runs.")])
        assert "warning  disk  1 GiB in /a[b]c" in shown
        assert "-> Delete [old] runs." in shown


class TestDocker:
    def test_no_socket_means_not_installed(self, tmp_path: Path):
        trial = try_docker({"DOCKER_HOST": f"unix://{tmp_path}/none.sock"})
        assert trial.found.startswith("no engine at unix://")
        assert "Install Docker Engine" in trial.remedy

    def test_a_socket_that_nobody_listens_at_means_not_running(self, tmp_path: Path):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "d.sock"))
        trial = try_docker({"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
        assert trial.found.startswith("nobody listens at unix://")
        assert "systemctl start docker" in trial.remedy

    def test_a_socket_without_the_right_to_use_it_is_told_apart(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(_: object) -> str:  # root, which tests may run as, is refused nothing
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(docker_probe, "ask_version", refuse)
        trial = try_docker({})
        assert trial.found == "no right to use unix:///var/run/docker.sock"
        assert "usermod -aG docker" in trial.remedy

    def test_an_engine_that_answers_is_reported_with_its_version(self, tmp_path: Path):
        body = json.dumps({"Version": "27.1", "ApiVersion": "1.46"})
        with answering(tmp_path / "d.sock", body) as requests:
            trial = try_docker({"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
        assert trial == DockerTrial(f"27.1, API 1.46 at unix://{tmp_path}/d.sock", "")
        assert requests[0].startswith(b"GET /version HTTP/1.0\r\n")

    @pytest.mark.parametrize("body", ["<html>", "{}", "[]"])
    def test_something_else_at_the_socket_is_no_engine(self, tmp_path: Path, body: str):
        with answering(tmp_path / "d.sock", body):
            trial = try_docker({"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
        assert "gave no usable answer" in trial.found

    @pytest.mark.parametrize("host", ["ssh://me@there", "npipe:////./pipe/docker_engine", "nonsense"])
    def test_an_address_that_the_doctor_does_not_speak_is_not_asked(self, host: str):
        assert try_docker({"DOCKER_HOST": host}).found == f"{host} was not asked"

    def test_a_rootless_engines_socket_is_preferred(self, tmp_path: Path):
        with answering(tmp_path / "docker.sock", json.dumps({"Version": "27.1", "ApiVersion": "1.46"})):
            trial = try_docker({"XDG_RUNTIME_DIR": str(tmp_path)})
        assert trial.found == f"27.1, API 1.46 at unix://{tmp_path}/docker.sock"

    def test_what_the_trial_says_is_the_finding(self):
        assert doctor.check_docker(DockerTrial("27.1", "")) == Finding("Docker engine", "ok", "27.1")
        assert doctor.check_docker(DockerTrial("none", "Install.")) == Finding(
            "Docker engine", "warning", "none", "Install."
        )


@contextmanager
def answering(path: Path, body: str) -> Iterator[list[bytes]]:
    """A server that answers one request with `body`; the requests it saw."""
    requests: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            requests.append(connection.recv(4096))
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n" + body.encode())

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        thread = threading.Thread(target=serve)
        thread.start()
        yield requests
        thread.join()


class TestIsolation:
    def test_a_sandbox_that_lacks_nothing_is_fine(self):
        finding = doctor.check_isolation(Isolation("docker", ("user", "pid"), True, (), landlock=7))
        assert finding.status == "ok"
        assert "user, pid" in finding.detail

    @pytest.mark.parametrize(("namespaces", "seccomp"), [((), True), (("user",), False)])
    def test_what_is_missing_is_a_warning_with_its_remedy(self, namespaces: tuple[str, ...], seccomp: bool):
        finding = doctor.check_isolation(Isolation("process", namespaces, seccomp, ("No X: refused.", "Do this.")))
        assert finding.status == "warning"
        assert finding.remedy == "No X: refused. Do this."


class TestSoftware:
    def test_a_torch_that_cannot_be_imported_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        finding = doctor.check_torch()
        assert finding.status == "missing"
        assert "make setup" in finding.remedy

    def test_a_package_that_is_not_installed_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(doctor.importlib.metadata, "version", absent)
        assert doctor.check_uvloop().status == "missing"

    @pytest.mark.parametrize(
        ("count", "driver", "cuda", "status", "said"),
        [
            (2, True, "12.8", "ok", "A GPU, 80 GiB; A GPU, 80 GiB"),
            (0, False, None, "warning", "none"),
            (0, True, None, "warning", "Install the torch build for CUDA"),
            (0, True, "12.8", "warning", "Update the NVIDIA driver"),
        ],
    )
    def test_a_gpu_that_torch_cannot_use_is_told_apart_from_none(
        self, monkeypatch: pytest.MonkeyPatch, count: int, driver: bool, cuda: str | None, status: str, said: str
    ):
        gpu = SimpleNamespace(name="A GPU", total_memory=80 * 2**30)
        available = SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, get_device_properties=lambda index: gpu
        )
        torch = SimpleNamespace(__version__="2.9", cuda=available, version=SimpleNamespace(cuda=cuda))
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(doctor, "Path", lambda path: SimpleNamespace(exists=lambda: driver))
        finding = doctor.check_gpu()
        assert finding.status == status
        assert said in f"{finding.detail} {finding.remedy}"


class TestCommand:
    @pytest.fixture(autouse=True)
    def structlog_as_before(self) -> Iterator[None]:
        yield
        structlog.reset_defaults()

    @pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("warning", 0), ("missing", 1)])
    def test_only_what_no_run_works_without_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, status: Status, exit_code: int
    ):
        monkeypatch.setattr(doctor, "examine", lambda run: [Finding("uvloop", status, "here", "Do this.")])
        said = CliRunner().invoke(app, ["doctor"])
        assert said.exit_code == exit_code
        assert said.output.splitlines()[1].split() == [status, "uvloop", "here"]
        assert "-> Do this." in said.output


class TestLimits:
    def test_an_old_python_is_missing_and_a_new_one_is_not(self):
        assert doctor.check_python((3, 10, 12)).status == "missing"
        assert doctor.check_python((3, 11, 0)).status == "ok"

    def test_the_cpu_features_that_matter_are_named(self, tmp_path: Path):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("model name\t: A Fine CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n")
        assert doctor.check_cpu(cpuinfo) == Finding("CPU", "ok", "A Fine CPU; AVX2, AVX-512, AMX BF16")

    def test_a_cpu_without_vector_extensions_is_a_warning(self, tmp_path: Path):
        cpuinfo = tmp_path / "cpuinfo"
        cpuinfo.write_text("model name\t: An Old CPU\nflags\t\t: fpu sse2\n")
        assert doctor.check_cpu(cpuinfo).status == "warning"

    def test_less_than_two_cores_is_a_warning(self):
        assert doctor.check_cores(1.5).status == "warning"
        assert doctor.check_cores(2).status == "ok"

    def test_little_memory_is_a_warning(self):
        assert doctor.check_memory((3 * 2**30, 64 * 2**30)).status == "warning"
        assert doctor.check_memory((8 * 2**30, 64 * 2**30)).detail == "8.0 GiB available of 64.0"

    def test_no_shared_memory_is_missing(self, tmp_path: Path):
        assert doctor.check_shared_memory(tmp_path / "shm").status == "missing"
        assert "free of" in doctor.check_shared_memory(tmp_path).detail

    def test_few_open_files_is_a_warning_and_unlimited_is_not(self):
        assert doctor.check_open_files(256, 4096).status == "warning"
        assert doctor.check_open_files(-1, -1) == Finding("open files", "ok", "unlimited (may be raised to unlimited)")

    def test_little_shared_memory_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        space = SimpleNamespace(f_frsize=4096, f_bavail=16_384, f_blocks=16_384)
        monkeypatch.setattr(doctor.os, "statvfs", lambda mount: space)
        finding = doctor.check_shared_memory(tmp_path)
        assert (finding.status, finding.detail) == ("warning", f"0.06 GiB free of 0.06 in {tmp_path}")
        assert "--shm-size=2g" in finding.remedy

    def test_a_control_groups_limits_are_this_machines(self, monkeypatch: pytest.MonkeyPatch):
        gib = 2**30
        files = {
            "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB",
            "/sys/fs/cgroup/memory.max": str(8 * gib),
            "/sys/fs/cgroup/memory.current": str(6 * gib),
            "/sys/fs/cgroup/cpu.max": "50000 100000",
        }
        monkeypatch.setattr(doctor, "_read", lambda path: files.get(path, ""))
        assert doctor.memory_bytes() == (2 * gib, 8 * gib)
        assert doctor.num_cores() == 0.5
        files["/sys/fs/cgroup/memory.max"] = "max"
        files["/sys/fs/cgroup/cpu.max"] = "max 100000"
        assert doctor.memory_bytes() == (32 * gib, 64 * gib)
        assert doctor.num_cores() >= 1

    def test_a_disk_that_is_almost_full_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(doctor.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
        finding = doctor.check_disk(tmp_path)
        assert (finding.status, finding.detail) == ("warning", f"1.0 GiB free in {tmp_path}")

    def test_a_folder_that_cannot_be_written_is_missing(self):
        assert doctor.check_disk(Path("/proc")).status == "missing"
