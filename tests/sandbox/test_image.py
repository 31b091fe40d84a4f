"""The sandbox image: its name says what is in it, its builder says what it lacks, and what it holds is enough."""

from __future__ import annotations

import io
import json
import os
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

import sandbox
from configs.errors import UNUSABLE
from sandbox import build_image, debian_base, image_context
from sandbox.docker_command import docker, engine_architecture, remove_other_tags
from sandbox.image import PACKAGES, image_name, sources
from sandbox.image_finish import MODIFIED_AT, compile_all, strip_setuid
from sandbox.image_tar import write_tar

FOLDER = Path(sandbox.__file__).parent
NO_ENGINE = "unix:///nonexistent/docker.sock"
Commands = Callable[..., Path]


def pins(path: Path) -> dict[str, str]:
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Puts the named shell scripts in the place of all commands."""
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
    @pytest.mark.parametrize("name", ["Dockerfile", "requirements.txt", "__init__.py", "inside/frames.py"])
    def test_another_content_of_a_source_is_another_image(self, name: str):
        files = sources()
        assert image_name(files) == image_name()
        assert image_name(files | {name: files[name] + b"\n"}) != image_name()

    def test_a_new_file_inside_is_another_image(self, tmp_path: Path):
        shutil.copytree(FOLDER, tmp_path / "sandbox", ignore=shutil.ignore_patterns("__pycache__"))
        assert image_name(sources(tmp_path / "sandbox")) == image_name()
        (tmp_path / "sandbox/inside/further.py").touch()
        assert image_name(sources(tmp_path / "sandbox")) != image_name()

    def test_what_stays_outside_does_not_count(self):
        assert not {"contract.py", "build_image.py", "image.py"} & set(sources())


class TestPackages:
    def test_a_package_has_the_version_that_the_rest_of_the_project_has(self):
        constraints = pins(FOLDER.parent / "constraints.txt")
        assert pins(FOLDER / "requirements.txt").items() <= constraints.items()

    def test_what_the_packages_require_is_listed_too(self):
        listed = pins(FOLDER / "requirements.txt")
        for name in listed:
            for requirement in map(Requirement, requires(name) or []):
                if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                    assert requirement.specifier.contains(listed[canonicalize_name(requirement.name)]), name

    def test_a_machine_without_wheels_is_refused(self, tmp_path: Path):
        with pytest.raises(ValueError, match=r"runs on riscv64; .* made for amd64, arm64"):
            image_context.install_packages(tmp_path / "requirements.txt", tmp_path, "riscv64")


class TestMessages:
    def built(self, caplog: pytest.LogCaptureFixture, *arguments: str) -> str:
        assert build_image.main(list(arguments)) == UNUSABLE
        return caplog.records[-1].getMessage()

    def test_without_an_engine_it_says_where_it_looked(self, caplog: Any, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setenv("DOCKER_HOST", NO_ENGINE)
        assert f"no engine at {NO_ENGINE}" in self.built(caplog)

    @pytest.fixture
    def engine(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(build_image, "engine_architecture", lambda: "amd64")

    def test_without_the_docker_command_it_names_the_package(self, caplog: Any, engine: None, commands: Commands):
        commands()
        assert "apt-get install docker.io" in self.built(caplog, "--local")

    def test_without_debootstrap_it_names_the_package(self, caplog: Any, engine: None, commands: Commands):
        commands(docker="", chroot="")
        assert self.built(caplog, "--local").endswith(
            "no `debootstrap` command here. On Debian: apt-get install debootstrap"
        )

    def test_only_root_may_debootstrap(
        self, caplog: Any, engine: None, commands: Commands, monkeypatch: pytest.MonkeyPatch
    ):
        commands(docker="", chroot="", debootstrap="")
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        assert "sudo make sandbox-image-local" in self.built(caplog, "--local")

    def test_what_debootstrap_says_last_is_passed_on(
        self, caplog: Any, engine: None, commands: Commands, monkeypatch: pytest.MonkeyPatch
    ):
        commands(docker="", chroot="", debootstrap="echo E: no such mirror $6 >&2; exit 3")
        monkeypatch.setattr(os, "geteuid", lambda: 0)
        message = self.built(caplog, "--local", "--mirror", "http://mirror.invalid")
        assert message == "debootstrap failed with status 3:\nE: no such mirror http://mirror.invalid"

    def test_what_docker_says_is_passed_on(self, caplog: Any, engine: None, commands: Commands):
        commands(docker="echo no space left >&2; exit 1")
        assert self.built(caplog, "--local") == "docker image failed:\nno space left"


class TestParts:
    def test_older_images_lose_their_names_unless_a_container_has_them(self, commands: Commands):
        folder = commands(
            docker='[ "$2 $3" = "rm name:used" ] && exit 1; [ "$2" = rm ] && echo $3 >> "$PATH/log"; '
            '[ "$2" = ls ] && echo "name:new name:used name:old name:<none>"; exit 0'
        )
        assert remove_other_tags("name", "name:new") == ["name:old"]
        assert (folder / "log").read_text() == "name:old\n"

    def test_the_same_files_are_the_same_tar_whenever_they_were_written(self, tmp_path: Path):
        tars: list[bytes] = []
        for root, names in ((tmp_path / "a", "ba"), (tmp_path / "b", "ab")):
            root.mkdir()
            for number, name in enumerate(names):
                (root / name).write_text(name)
                os.utime(root / name, (number, number))
            tars.append(tar_of(root))
        assert tars[0] == tars[1]

    def test_the_base_is_stripped_of_setuid_bits_caches_and_the_hosts_own_name(self, tmp_path: Path):
        kept = ["usr/bin/su", "usr/share/doc/su/copyright", "etc/passwd"]
        dropped = ["etc/hostname", "etc/shadow", "etc/passwd-", "usr/share/man/su.1", "usr/share/doc/su/changelog"]
        dropped += ["var/cache/apt/su.deb", "usr/lib/python3/__pycache__/su.pyc", "var/log/dpkg.log"]
        for name in kept + dropped:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
            (tmp_path / name).chmod(0o4755)
        entries = io.BytesIO(tar_of(tmp_path, debian_base.stripped))
        with tarfile.open(fileobj=entries) as tar:
            files = {entry.name: entry.mode for entry in tar if entry.isreg()}
        assert files == dict.fromkeys(kept, 0o755)

    def test_setuid_bits_are_taken_from_files_and_left_on_folders(self, tmp_path: Path):
        program, folder = tmp_path / "program", tmp_path / "folder"
        program.touch()
        program.chmod(0o6755)
        folder.mkdir()
        folder.chmod(0o1777)
        strip_setuid(tmp_path)
        assert (program.stat().st_mode & 0o7777, folder.stat().st_mode & 0o7777) == (0o755, 0o1777)

    def test_compiled_modules_are_used_without_a_look_at_their_source(self, tmp_path: Path):
        (tmp_path / "module.py").write_text("x = 1\n")
        compile_all(tmp_path)
        (compiled,) = (tmp_path / "__pycache__").iterdir()
        assert int.from_bytes(compiled.read_bytes()[4:8], "little") == 0b01  # PEP 552: by hash, unchecked
        assert {path.stat().st_mtime for path in (compiled, compiled.parent, tmp_path)} == {MODIFIED_AT}


def tar_of(root: Path, adapt: Any = lambda entry: entry) -> bytes:
    stream = io.BytesIO()
    write_tar(root, stream, adapt)
    return stream.getvalue()


@pytest.mark.slow
def test_without_an_engine_the_tests_that_need_one_fail_the_run():
    command = [sys.executable, "-m", "pytest", "-m", "docker", __file__, "-p", "no:cacheprovider"]
    run = subprocess.run(command, env=os.environ | {"DOCKER_HOST": NO_ENGINE}, capture_output=True, text=True)
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
    assert "make test-without-docker" in run.stderr
    assert "passed" not in run.stdout


_TRY_PACKAGES = f"""
import json, os, sys
sys.path.insert(0, {PACKAGES!r})
import numpy, sympy, math_verify
import sandbox.inside.fork_server
specs = [getattr(module, "__spec__", None) for module in sys.modules.values()]
specs = [spec for spec in specs if spec and spec.cached]
print(json.dumps({{
    "uid": os.getuid(),
    "right": math_verify.verify(math_verify.parse("$1/2$"), math_verify.parse("0.5")),
    "compiled": sys.modules["sympy"].__spec__ in specs,
    "uncompiled": [spec.name for spec in specs if not os.path.exists(spec.cached)],
    "writable": os.access("/opt/asterism", os.W_OK),
}}))
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
    def inside(self, code: str, *options: str) -> str:
        locked = ("run", "--rm", "--network", "none", "--read-only", *options)
        return docker(*locked, "--entrypoint", "python3", image_name(), "-B", "-c", code)

    def test_it_is_under_300_mb(self):
        assert int(docker("image", "inspect", "--format", "{{.Size}}", image_name())) < 300e6

    def test_it_runs_the_keeper_as_nobody(self):
        config = json.loads(docker("image", "inspect", "--format", "{{json .Config}}", image_name()))
        assert config["User"] == "65534:65534"
        assert config["Entrypoint"][-1] == "sandbox.inside.keeper"

    def test_its_packages_work_compiled_on_a_read_only_root_without_network(self):
        found = json.loads(self.inside(_TRY_PACKAGES, "--cap-drop", "ALL", "--security-opt", "no-new-privileges"))
        assert found == {"uid": 65534, "right": True, "compiled": True, "uncompiled": [], "writable": False}

    def test_no_program_in_it_is_setuid(self):
        assert self.inside(_FIND_SETUID, "--user", "0") == ""

    def test_two_builds_give_the_same_layers(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
        def one_module(requirements: Path, folder: Path, architecture: str) -> None:
            folder.mkdir()
            (folder / "one_module.py").write_text("names = {'a', 'b', None}\n")

        monkeypatch.setattr(image_context, "install_packages", one_module)
        layers: list[str] = []
        for name in ("first", "second"):
            (tmp_path / name).mkdir()
            image_context.write_context(tmp_path / name, sources(), engine_architecture())
            options = ("--quiet", "--no-cache", "--network", "none", "--build-arg", f"BASE={image_name()}")
            image = docker("build", *options, str(tmp_path / name))
            layers.append(docker("image", "inspect", "--format", "{{json .RootFS.Layers}}", image))
            docker("image", "rm", image)
        assert layers[0] == layers[1]
