"""`asterism join`: what is said and which exit code comes of it, however a membership ends."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from actors import join_command
from actors.children import ProcessDied
from actors.join_command import INTERRUPTED, address_of, join_run, own_address
from actors.node import Ending, Joining
from bus.book import Address
from configs.errors import UnusableInput

JOINING = Joining(Address("10.0.0.1", 29_600), Address("10.0.0.2", 29_700), Path("keys/cluster.key"), patience_s=8.0)


def joined(monkeypatch: pytest.MonkeyPatch, *endings: Ending | Exception) -> tuple[int, list[str]]:
    """With the memberships that end so, one after the other."""
    left = list(endings)

    async def take_part(*_: object) -> Ending:
        ending = left.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(join_command, "take_part", take_part)
    file = io.StringIO()
    code = join_run(JOINING, Console(file=file, width=40))
    assert left == []
    return code, file.getvalue().splitlines()


JOINS = "joining the run at tcp://10.0.0.1:29600 from 10.0.0.2:29700"


def test_a_run_that_is_over_is_a_success(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, "over") == (0, [JOINS, "the run is over"])


def test_who_was_cut_off_joins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    again = "tcp://10.0.0.1:29600 has fallen silent; joining again"
    assert joined(monkeypatch, "lost", "lost", "over") == (0, [JOINS, again, again, "the run is over"])


def test_who_was_interrupted_has_its_own_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    assert joined(monkeypatch, "lost", "interrupted")[0] == INTERRUPTED


def test_who_was_never_answered_is_told_what_to_look_at(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnusableInput, match=r"tcp://10\.0\.0\.1:29600 has not answered for 8 s: .* keys/cluster\.key "):
        joined(monkeypatch, "unheard")


def test_a_process_that_cannot_be_kept_alive_is_a_failure_with_its_words_as_they_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code, said = joined(monkeypatch, ProcessDied("generator-0@1 ended: [/dev/gpu7] is missing"))
    assert (code, said[-1]) == (1, "failed: generator-0@1 ended: [/dev/gpu7] is missing")


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:29600", "10.0.0.1:29600"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    assert address_of(endpoint) == JOINING.at


@pytest.mark.parametrize("endpoint", ["", "10.0.0.1", ":29600", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "a:b"])
def test_what_is_no_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UnusableInput, match=r"an endpoint is tcp://HOST:PORT"):
        address_of(endpoint)


@pytest.mark.parametrize("port", [-3, 80, 65_436, 99_999_999])
def test_a_port_that_leaves_no_room_for_a_nodes_ports_is_refused(port: int) -> None:
    with pytest.raises(UnusableInput, match=f"^--port {port}: it must lie between 1024 and 65435"):
        own_address(JOINING.at, "10.0.0.2", port)


def test_where_it_listens_follows_from_where_the_run_does() -> None:
    at = Address("127.0.0.1", 29_600)
    assert own_address(at, "", 0) == at
    assert own_address(at, "10.0.0.2", 29_700) == JOINING.own
