"""Identities of owner processes, across machines and pid namespaces."""

from __future__ import annotations

from pathlib import Path

import pytest

from sandbox.hosts.docker import connection_gate as process_identity
from sandbox.hosts.docker.connection_gate import get_process_identity, has_process_exited


def test_only_identities_of_this_machine_count_as_exited() -> None:
    assert not has_process_exited(get_process_identity())
    machine = get_process_identity().partition("/")[0]
    assert has_process_exited(f"{machine}/{2**22 + 1}/1")
    assert not has_process_exited("another-machine/1/1")


def test_a_process_of_another_pid_namespace_does_not_count_as_exited(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # The pid of this process, with another start time.
    identity = get_process_identity().rpartition("/")[0] + "/1"
    assert has_process_exited(identity)
    namespace_file = tmp_path / "pid"
    namespace_file.symlink_to("pid:[1]")
    monkeypatch.setattr(process_identity, "_PID_NAMESPACE_FILE", namespace_file)
    assert not has_process_exited(identity)
