"""`asterism doctor` finds each problem and prints a remedy."""

import importlib.metadata
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from asterism.actors.cli.doctor import configuration_checks, machine_checks
from asterism.actors.cli.doctor.finding import (
    CheckResult,
    DoctorFinding,
    FindingStatus,
    build_findings_table,
    run_check,
)
from asterism.actors.launch.checks import input_checks
from asterism.actors.launch.claim_run_folder import RunFolderError, check_disk_space
from asterism.configs.schema.machines import SandboxConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.sandbox.contract import Isolation, SandboxFailure
from asterism.sandbox.hosts.docker import docker_probe
from asterism.sandbox.hosts.docker.docker_probe import DockerProbeResult, probe_docker
from tests.actors.cli.golden_text import assert_matches_golden
from tests.actors.cli.invoking import invoke
from tests.consoles import capture

COMPLETE = Isolation("docker", ("user", "pid"), True, (), landlock=7)
INCOMPLETE = Isolation("process", (), False, ("No X: refused.", "Do this."))
NAMES = [
    *("Python", "torch", "uvloop", "CPU", "cores", "memory", "GPU"),
    *("Docker engine", "dead runs", "sandbox", "shared memory", "open files", "disk", "SGLang"),
]


class TestExamination:
    @pytest.mark.slow
    def test_all_checks_run_and_every_problem_has_a_remedy(self, tmp_path: Path):
        findings = machine_checks.examine(tmp_path)
        assert list(findings) == NAMES
        assert all(finding.detail for finding in findings.values())
        assert all(bool(finding.remedy) == (finding.status != "ok") for finding in findings.values())

    @pytest.mark.slow
    def test_a_failing_check_is_a_warning_and_the_others_run(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def breaks(*_: object) -> CheckResult:
            raise RuntimeError("odd machine")

        monkeypatch.setattr(machine_checks, "check_cpu", breaks)
        findings = machine_checks.examine(tmp_path)
        assert list(findings) == NAMES
        assert findings["CPU"].status == "warning"
        assert findings["CPU"].detail == "the check failed: RuntimeError: odd machine"

    def test_the_table_shows_findings_and_remedies_verbatim(self):
        disk = DoctorFinding("warning", "1 GiB in /a[b]c", "Delete [old] runs.")
        table = build_findings_table({"CPU": DoctorFinding("ok", "AVX2"), "disk": disk})
        assert_matches_golden("doctor_findings", capture(lambda console: console.print(table), width=100))


class TestDocker:
    def test_a_missing_socket_and_a_socket_without_a_listener_have_different_remedies(self, tmp_path: Path):
        environment = {"DOCKER_HOST": f"unix://{tmp_path}/d.sock"}
        missing = probe_docker(environment)
        assert missing.description.startswith("no engine at unix://")
        assert "Install Docker Engine" in missing.remedy
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(tmp_path / "d.sock"))
        stopped = probe_docker(environment)
        assert stopped.description.startswith("no process listens at unix://")
        assert "systemctl start docker" in stopped.remedy

    def test_a_socket_without_permission_is_reported_separately(self, monkeypatch: pytest.MonkeyPatch):
        def refuse(_: object) -> str:  # no permission bits, since the tests may run as root
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(docker_probe, "query_version", refuse)
        trial = probe_docker({})
        assert trial.description == "no permission for unix:///var/run/docker.sock"
        assert "usermod -aG docker" in trial.remedy

    def test_a_running_engine_is_reported_with_its_version(self, tmp_path: Path):
        body = json.dumps({"Version": "27.1", "ApiVersion": "1.46"})
        with answering(tmp_path / "d.sock", body) as requests:
            trial = probe_docker({"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
        assert trial == DockerProbeResult(f"27.1, API 1.46 at unix://{tmp_path}/d.sock", "")
        assert requests[0].startswith(b"GET /version HTTP/1.0\r\n")

    @pytest.mark.parametrize("body", ["<html>", "{}", "[]"])
    def test_another_server_at_the_socket_is_not_an_engine(self, tmp_path: Path, body: str):
        with answering(tmp_path / "d.sock", body):
            trial = probe_docker({"DOCKER_HOST": f"unix://{tmp_path}/d.sock"})
        assert "gave no usable answer" in trial.description

    @pytest.mark.parametrize("host", ["ssh://me@there", "npipe:////./pipe/docker_engine", "nonsense"])
    def test_an_unsupported_address_is_not_probed(self, host: str):
        assert probe_docker({"DOCKER_HOST": host}).description == f"{host} is not supported"

    def test_a_rootless_engines_socket_is_preferred(self, tmp_path: Path):
        with answering(tmp_path / "docker.sock", json.dumps({"Version": "27.1", "ApiVersion": "1.46"})):
            trial = probe_docker({"XDG_RUNTIME_DIR": str(tmp_path)})
        assert trial.description == f"27.1, API 1.46 at unix://{tmp_path}/docker.sock"


@contextmanager
def answering(path: Path, body: str) -> Iterator[list[bytes]]:
    """Serve one request with `body`, and yield the received requests."""
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


class TestSoftware:
    def test_a_broken_torch_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "torch", None)
        finding = run_check(machine_checks.check_torch)
        assert finding.status == "missing"
        assert "make setup" in finding.remedy

    def test_an_uninstalled_package_is_missing(self, monkeypatch: pytest.MonkeyPatch):
        def absent(name: str) -> str:
            raise importlib.metadata.PackageNotFoundError(name)

        monkeypatch.setattr(machine_checks.importlib.metadata, "version", absent)
        assert run_check(machine_checks.check_uvloop).status == "missing"

    @pytest.mark.parametrize(
        ("count", "driver", "cuda", "status", "expected"),
        [
            (2, True, "12.8", "ok", "A GPU, 80 GiB; A GPU, 80 GiB"),
            (0, False, None, "warning", "none"),
            (0, True, None, "warning", "Install the CUDA build of torch"),
            (0, True, "12.8", "warning", "Update the NVIDIA driver"),
        ],
    )
    def test_an_unusable_gpu_and_no_gpu_have_different_remedies(
        self, monkeypatch: pytest.MonkeyPatch, count: int, driver: bool, cuda: str | None, status: str, expected: str
    ):
        gpu = SimpleNamespace(name="A GPU", total_memory=80 * 2**30)
        available = SimpleNamespace(
            is_available=lambda: count > 0, device_count=lambda: count, get_device_properties=lambda index: gpu
        )
        torch = SimpleNamespace(__version__="2.9", cuda=available, version=SimpleNamespace(cuda=cuda))
        monkeypatch.setitem(sys.modules, "torch", torch)
        monkeypatch.setattr(machine_checks, "Path", lambda path: SimpleNamespace(exists=lambda: driver))
        finding = run_check(machine_checks.check_gpu)
        assert finding.status == status
        assert expected in f"{finding.detail} {finding.remedy}"


class TestCommand:
    @pytest.mark.parametrize(("status", "exit_code"), [("ok", 0), ("warning", 0), ("missing", 1), ("unusable", 1)])
    def test_only_a_missing_part_is_an_error(
        self, monkeypatch: pytest.MonkeyPatch, status: FindingStatus, exit_code: int
    ):
        monkeypatch.setattr(
            machine_checks, "examine", lambda run: {"uvloop": DoctorFinding(status, "here", "Do this.")}
        )
        result = invoke("doctor")
        assert result.exit_code == exit_code
        assert result.output.splitlines()[1].split() == [status, "uvloop", "here"]
        assert "-> Do this." in result.output


def check_flags(folder: Path, flags: str) -> CheckResult:
    (folder / "cpuinfo").write_text(f"model name\t: A CPU\nflags\t\t: {flags}\n")
    return machine_checks.check_cpu(folder / "cpuinfo")


class TestLimits:
    @pytest.mark.parametrize(
        ("check", "status", "detail"),
        [
            (lambda _: machine_checks.check_python((3, 10, 12)), "missing", "3.10.12"),
            (lambda _: machine_checks.check_python((3, 11, 0)), "ok", "3.11.0 ("),
            (lambda folder: check_flags(folder, "fpu avx2 avx512f amx_bf16"), "ok", "A CPU; AVX2, AVX-512, AMX BF16"),
            (lambda folder: check_flags(folder, "fpu sse2"), "warning", "A CPU; no vector extensions"),
            (lambda _: machine_checks.check_cores(1.5), "warning", "1.5 usable"),
            (lambda _: machine_checks.check_cores(2), "ok", "2 usable"),
            (lambda _: machine_checks.check_memory((3 << 30, 64 << 30)), "warning", "3.00 GiB available of 64.00 GiB"),
            (lambda _: machine_checks.check_memory((8 << 30, 64 << 30)), "ok", "8.00 GiB available of 64.00 GiB"),
            (lambda folder: machine_checks.check_shared_memory(folder / "shm"), "missing", "no "),
            (lambda _: machine_checks.check_open_files(256, 4096), "warning", "256 (may be raised to 4,096)"),
            (lambda _: machine_checks.check_open_files(-1, -1), "ok", "unlimited (may be raised to unlimited)"),
            (lambda _: machine_checks.check_disk(Path("/proc")), "missing", "/proc cannot be written: "),
            (lambda _: machine_checks.check_docker(DockerProbeResult("27.1", "")), "ok", "27.1"),
            (lambda _: machine_checks.check_docker(DockerProbeResult("none", "Install.")), "warning", "none"),
            (lambda _: machine_checks.check_isolation(COMPLETE), "ok", "docker; namespaces: user, pid"),
            (lambda _: machine_checks.check_isolation(INCOMPLETE), "warning", "process"),
        ],
    )
    def test_a_limit_that_is_too_low_is_found(
        self, tmp_path: Path, check: Callable[[Path], CheckResult], status: FindingStatus, detail: str
    ):
        result = run_check(lambda: check(tmp_path))
        assert result.status == status
        assert result.detail.startswith(detail)
        assert bool(result.remedy) == (status != "ok")

    @pytest.mark.parametrize(("pages", "status"), [(16_384, "warning"), (1 << 20, "ok")])
    def test_little_shared_memory_is_a_warning(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pages: int, status: FindingStatus
    ):
        space = SimpleNamespace(f_frsize=4096, f_bavail=pages, f_blocks=pages)
        monkeypatch.setattr(machine_checks.os, "statvfs", lambda mount: space)
        result = run_check(lambda: machine_checks.check_shared_memory(tmp_path))
        size = "64.00 MiB" if pages == 16_384 else "4.00 GiB"
        assert (result.status, result.detail) == (status, f"{size} free of {size} in {tmp_path}")

    def test_cgroup_limits_reduce_the_reported_memory_and_cores(self, monkeypatch: pytest.MonkeyPatch):
        gib = 2**30
        files = {
            "/proc/meminfo": f"MemTotal: {64 << 20} kB\nMemFree: 1 kB\nMemAvailable: {32 << 20} kB",
            "/sys/fs/cgroup/memory.max": str(8 * gib),
            "/sys/fs/cgroup/memory.current": str(6 * gib),
            "/sys/fs/cgroup/cpu.max": "50000 100000",
        }
        for module in (machine_checks, input_checks):
            monkeypatch.setattr(module, "read_kernel_file", lambda path: files.get(path, ""))
        assert machine_checks.read_memory_bytes() == (2 * gib, 8 * gib)
        assert machine_checks.count_usable_cores() == 0.5
        files |= {"/sys/fs/cgroup/memory.max": "max", "/sys/fs/cgroup/cpu.max": "max 100000"}
        assert machine_checks.read_memory_bytes() == (32 * gib, 64 * gib)
        assert machine_checks.count_usable_cores() >= 1

    def test_an_almost_full_disk_is_a_warning(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=2**30))
        result = run_check(lambda: machine_checks.check_disk(tmp_path))
        assert (result.status, result.detail) == ("warning", f"1.00 GiB free in {tmp_path}")

    def test_a_disk_that_is_too_full_for_a_run_is_reported_with_the_message_of_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda folder: SimpleNamespace(free=63 << 20))
        with pytest.raises(RunFolderError) as refused:
            check_disk_space(tmp_path)
        result = run_check(lambda: machine_checks.check_disk(tmp_path / "runs" / "new"), "Free some.")
        assert (result.status, result.detail) == ("unusable", str(refused.value))

    def test_the_configured_sandbox_is_checked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
        """Without a Docker engine, a run with sandbox.backend = "docker" cannot start; a run with the default can."""

        def probe(config: SandboxConfig | None) -> Isolation:
            if config is not None and config.backend == "docker":
                raise SandboxFailure("no Docker engine")
            return COMPLETE

        monkeypatch.setattr(machine_checks, "probe_isolation", probe)
        monkeypatch.setattr(configuration_checks, "check_run", lambda run: {})
        monkeypatch.setattr(configuration_checks, "check_sglang", lambda folder: "none")
        run = RunConfig("a", sandbox=SandboxConfig(backend="docker"))
        found = machine_checks.examine(tmp_path, run)["sandbox"]
        assert (found.status, found.detail, found.is_refused) == ("unusable", "no Docker engine", True)
        assert found.remedy
        assert machine_checks.examine(tmp_path)["sandbox"].status == "ok"
