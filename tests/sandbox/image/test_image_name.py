"""The name of the sandbox image, the errors of its builder, and the content of the built image."""

import io
import json
import logging.handlers
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from asterism import sandbox
from asterism.configs.errors import EXIT_UNUSABLE, UnusableInput
from asterism.sandbox.hosts.docker.docker_host import compute_image_name, read_sources
from asterism.sandbox.image import build_image, debian_base, image_context
from asterism.sandbox.image.docker_cli import get_engine_architecture, remove_other_tags, run_docker
from asterism.sandbox.image.finish_image import MODIFIED_AT, compile_all, strip_setuid

FOLDER = Path(sandbox.__file__).resolve().parent
NO_ENGINE = "unix:///nonexistent/docker.sock"
Commands = Callable[..., Path]


def pins(path: Path) -> dict[str, str]:
    """Return versions by package. Indented lines, which contain hashes, are skipped."""
    lines = [line.removesuffix(" \\") for line in path.read_text().splitlines() if not line.startswith(("#", " "))]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Replace PATH by a folder that contains only the given shell scripts."""
    folder = tmp_path / "commands"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))

    def write(**scripts: str) -> Path:
        for name, script in scripts.items():
            (folder / name).write_text(f"#!/bin/sh\n{script}\n")
            (folder / name).chmod(0o755)
        return folder

    return write


class TestName:
    @pytest.mark.parametrize(
        "name", ["image/Dockerfile", "image/requirements.txt", "__init__.py", "inside/wire/frames.py"]
    )
    def test_a_changed_source_changes_the_name(self, name: str):
        files = read_sources()
        assert compute_image_name(files) == compute_image_name()
        assert compute_image_name(files | {name: files[name] + b"\n"}) != compute_image_name()

    def test_a_new_file_in_the_inside_folder_changes_the_name(self, tmp_path: Path):
        shutil.copytree(FOLDER, tmp_path / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        assert compute_image_name(read_sources(tmp_path / "sandbox")) == compute_image_name()
        (tmp_path / "sandbox/inside/further.py").touch()
        assert compute_image_name(read_sources(tmp_path / "sandbox")) != compute_image_name()

    def test_files_outside_the_image_do_not_affect_the_name(self):
        assert not {"contract.py", "image/build_image.py", "image/image_name.py"} & set(read_sources())


class TestPackages:
    def test_packages_have_the_versions_of_the_projects_constraints(self):
        constraints = pins(FOLDER.parent / "constraints.txt")
        assert pins(FOLDER / "image" / "requirements.txt").items() <= constraints.items()

    def test_all_dependencies_of_the_packages_are_listed(self):
        listed = pins(FOLDER / "image" / "requirements.txt")
        for name in listed:
            for requirement in map(Requirement, requires(name) or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    assert requirement.specifier.contains(listed[canonicalize_name(requirement.name)]), name

    @pytest.mark.slow
    def test_every_package_has_hashes_that_pip_checks(self, tmp_path: Path):
        text = (FOLDER / "image" / "requirements.txt").read_text()
        blocks = re.sub(r" \\\n +", " ", "".join(re.findall(r"^[^#].*\n", text, re.MULTILINE))).splitlines()
        assert len(blocks) == len(pins(FOLDER / "image" / "requirements.txt"))
        for block in blocks:
            assert re.fullmatch(r"\S+==\S+( --hash=sha256:[0-9a-f]{64})+", block), block
        assert len(re.findall("--hash", next(block for block in blocks if block.startswith("numpy")))) == 2
        requirements = tmp_path / "requirements.txt"
        requirements.write_text("mpmath==1.3.0\n")
        with pytest.raises(UnusableInput, match=r"(?s)Hashes are required in --require-hashes mode.*mpmath==1\.3\.0"):
            image_context.install_packages(requirements, tmp_path / "packages", "amd64")

    def test_the_base_image_is_pinned_by_digest(self):
        text = (FOLDER / "image" / "Dockerfile").read_text()
        assert re.search(r"^ARG BASE=python:3\.11\.\d+-slim-bookworm@sha256:[0-9a-f]{64}$", text, re.MULTILINE)

    def test_an_architecture_without_wheels_is_refused(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"runs on riscv64; .* supports amd64, arm64"):
            image_context.install_packages(tmp_path / "requirements.txt", tmp_path, "riscv64")


class TestMessages:
    def build_and_read_error(self, monkeypatch: pytest.MonkeyPatch, *arguments: str) -> str:
        handler = logging.handlers.BufferingHandler(capacity=100)
        monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
        assert build_image.main(list(arguments)) == EXIT_UNUSABLE
        return handler.buffer[-1].getMessage()

    def test_the_error_for_a_missing_engine_names_its_address(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        assert f"no engine at {NO_ENGINE}" in self.build_and_read_error(monkeypatch)

    @pytest.mark.parametrize(
        ("scripts", "uid", "message"),
        [
            ({}, 0, r"apt-get install docker\.io"),
            (
                {"docker": "", "chroot": ""},
                0,
                r"the command `debootstrap` is not installed\. On Debian: apt-get install debootstrap$",
            ),
            ({"docker": "", "chroot": "", "debootstrap": ""}, 1000, "sudo make sandbox-image-local"),
            (
                {"docker": "", "chroot": "", "debootstrap": "echo E: no such mirror $6 >&2; exit 3"},
                0,
                r"^debootstrap failed with status 3:\nE: no such mirror http://mirror\.invalid$",
            ),
            ({"docker": "echo no space left >&2; exit 1"}, 0, r"^docker image failed:\nno space left$"),
        ],
        ids=["no docker", "no debootstrap", "no root", "debootstrap fails", "docker fails"],
    )
    def test_the_error_of_a_local_build_names_the_cause(
        self, monkeypatch: Any, commands: Commands, scripts: dict[str, str], uid: int, message: str
    ):
        monkeypatch.setattr(build_image, "get_engine_architecture", lambda: "amd64")
        monkeypatch.setattr(os, "geteuid", lambda: uid)
        commands(**scripts)
        assert re.search(
            message, self.build_and_read_error(monkeypatch, "--local", "--mirror", "http://mirror.invalid")
        )


class TestParts:
    def test_names_of_older_images_are_removed_unless_a_container_uses_them(self, commands: Commands):
        folder = commands(
            docker='[ "$2 $3" = "rm name:used" ] && exit 1; [ "$2" = rm ] && echo $3 >> "$PATH/log"; '
            '[ "$2" = ls ] && echo "name:new name:used name:old name:<none>"; exit 0'
        )
        assert remove_other_tags("name", "name:new") == ["name:old"]
        assert (folder / "log").read_text() == "name:old\n"

    def test_the_same_files_give_the_same_tar_despite_other_times(self, tmp_path: Path):
        tars: list[bytes] = []
        for root, names in ((tmp_path / "a", "ba"), (tmp_path / "b", "ab")):
            root.mkdir()
            for number, name in enumerate(names):
                (root / name).write_text(name)
                os.utime(root / name, (number, number))
            tars.append(build_tar(root))
        assert tars[0] == tars[1]

    def test_the_base_has_no_setuid_bits_caches_or_host_name(self, tmp_path: Path):
        kept = ["usr/bin/su", "usr/share/doc/su/copyright", "etc/passwd"]
        dropped = ["etc/hostname", "etc/shadow", "etc/passwd-", "usr/share/man/su.1", "usr/share/doc/su/changelog"]
        dropped += ["var/cache/apt/su.deb", "usr/lib/python3/__pycache__/su.pyc", "var/log/dpkg.log"]
        for name in kept + dropped:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
            (tmp_path / name).chmod(0o4755)
        entries = io.BytesIO(build_tar(tmp_path, debian_base.strip_entry))
        with tarfile.open(fileobj=entries) as tar:
            files = {entry.name: entry.mode for entry in tar if entry.isreg()}
        assert files == dict.fromkeys(kept, 0o755)

    def test_setuid_bits_are_removed_from_files_and_kept_on_folders(self, tmp_path: Path):
        program, folder = tmp_path / "program", tmp_path / "folder"
        program.touch()
        program.chmod(0o6755)
        folder.mkdir()
        folder.chmod(0o1777)
        strip_setuid(tmp_path)
        assert (program.stat().st_mode & 0o7777, folder.stat().st_mode & 0o7777) == (0o755, 0o1777)

    def test_compiled_modules_are_not_checked_against_their_sources(self, tmp_path: Path):
        (tmp_path / "module.py").write_text("x = 1\n")
        compile_all(tmp_path)
        (compiled,) = (tmp_path / "__pycache__").iterdir()
        # PEP 552: these flags mean a hash that is not checked.
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b01
        assert {path.stat().st_mtime for path in (compiled, compiled.parent, tmp_path)} == {MODIFIED_AT}


def build_tar(root: Path, adapt: Any = lambda entry: entry) -> bytes:
    stream = io.BytesIO()
    image_context.write_tar(root, stream, adapt)
    return stream.getvalue()


@pytest.mark.slow
def test_docker_tests_without_an_engine_end_with_a_usage_error():
    command = [sys.executable, "-m", "pytest", "-m", "docker", __file__, "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=os.environ | {"DOCKER_HOST": NO_ENGINE}, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "make test-without-docker" in run.stderr
    assert "passed" not in run.stdout


_TRY_PACKAGES = """
import json, os, sys
sys.path.insert(0, "/opt/asterism/packages")
import numpy, sympy, math_verify
import asterism.sandbox.inside.server.fork_server
specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
specs = [spec for spec in specs if spec and spec.cached]
print(json.dumps({
    "uid": os.getuid(),
    "right": math_verify.verify(math_verify.parse("$1/2$"), math_verify.parse("0.5")),
    "compiled": sys.modules["sympy"].__spec__ in specs,
    "uncompiled": [spec.name for spec in specs if not os.path.exists(spec.cached)],
    "writable": os.access("/opt/asterism", os.W_OK),
}))
"""
_FIND_SETUID = """
import os, stat
for folder, folders, files in os.walk("/", onerror=None):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/sys")]
    for name in files:
        mode = os.lstat(os.path.join(folder, name)).st_mode
        if stat.S_ISREG(mode) and mode & (stat.S_ISUID | stat.S_ISGID):
            print(os.path.join(folder, name))
"""


@pytest.mark.docker
@pytest.mark.slow
class TestBuiltImage:
    def run_inside(self, code: str, *options: str) -> str:
        locked = ("run", "--rm", "--network", "none", "--read-only", *options)
        return run_docker(*locked, "--entrypoint", "python3", compute_image_name(), "-B", "-c", code)

    def test_the_image_is_smaller_than_300_mb(self):
        assert int(run_docker("image", "inspect", "--format", "{{.Size}}", compute_image_name())) < 300e6

    def test_the_image_runs_the_init_process_as_an_unprivileged_user(self):
        config = json.loads(run_docker("image", "inspect", "--format", "{{json .Config}}", compute_image_name()))
        assert config["User"] == "65534:65534"
        assert config["Entrypoint"][-1] == "asterism.sandbox.inside.container_init"

    def test_compiled_packages_work_on_a_read_only_root_without_network(self):
        found = json.loads(self.run_inside(_TRY_PACKAGES, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"))
        assert found == {"uid": 65534, "right": True, "compiled": True, "uncompiled": [], "writable": False}

    def test_no_program_in_the_image_is_setuid(self):
        assert self.run_inside(_FIND_SETUID, "--user", "0") == ""

    @pytest.mark.nightly
    def test_two_builds_give_the_same_layers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def one_module(requirements: Path, folder: Path, architecture: str) -> None:
            folder.mkdir()
            (folder / "one_module.py").write_text("names = {'a', 'b', None}\n")

        monkeypatch.setattr(image_context, "install_packages", one_module)
        layers: list[str] = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            image_context.write_context(tmp_path / name, read_sources(), get_engine_architecture())
            options = ("--quiet", "--no-cache", "--network", "none", "--build-arg", f"BASE={compute_image_name()}")
            image = run_docker("build", *options, str(tmp_path / name))
            layers.append(run_docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
            run_docker("image", "rm", image)
        assert layers[0] == layers[1]
