"""`asterism join` prints a message and exits with a code for each way in which a membership ends."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from asterism.actors.cli import join_command
from asterism.actors.cli.join_command import EXIT_INTERRUPTED, choose_own_address, join_run, parse_endpoint
from asterism.actors.launch.child_processes import ProcessDied
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.actors.launch.node_agent import NodeEnding
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.errors import UnusableInput

JOINING = JoinOptions(
    TcpAddress("10.0.0.1", 29_600), TcpAddress("10.0.0.2", 29_700), Path("keys/cluster.key"), join_timeout_s=8.0
)


def joined(monkeypatch: pytest.MonkeyPatch, *endings: NodeEnding | Exception) -> tuple[int, list[str]]:
    """Return exit code and output of a node whose memberships end in these ways, one after the other."""
    remaining = list(endings)

    async def take_part(*_: object) -> NodeEnding:
        ending = remaining.pop(0)
        if isinstance(ending, Exception):
            raise ending
        return ending

    monkeypatch.setattr(join_command, "join_once", take_part)
    file = io.StringIO()
    code = join_run(JOINING, Console(file=file, width=40))
    assert remaining == []
    return code, file.getvalue().splitlines()


JOINS = "joining the run at tcp://10.0.0.1:29600 from 10.0.0.2:29700"
DEATH = "a process ended: [/dev/gpu7] is missing"
AGAIN = "tcp://10.0.0.1:29600 stopped answering; joining again"


@pytest.mark.parametrize(
    ("endings", "code", "lines"),
    [
        (["over"], 0, ["the run is over"]),
        (["lost", "lost", "over"], 0, [AGAIN, AGAIN, "the run is over"]),
        (["lost", "interrupted"], EXIT_INTERRUPTED, [AGAIN]),
        ([ProcessDied(DEATH)], 1, [f"failed: {DEATH}"]),
    ],
    ids=["over", "disconnected", "interrupted", "failed"],
)
def test_each_kind_of_ending_has_its_exit_code_and_output(
    monkeypatch: pytest.MonkeyPatch, endings: list[NodeEnding | Exception], code: int, lines: list[str]
) -> None:
    assert joined(monkeypatch, *endings) == (code, [JOINS, *lines])


def test_without_an_answer_the_error_names_what_to_check(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        UnusableInput, match=r"tcp://10\.0\.0\.1:29600 has not answered for 8 s: .* keys/cluster\.key is "
    ):
        joined(monkeypatch, "unanswered")


@pytest.mark.parametrize("endpoint", ["tcp://10.0.0.1:29600", "10.0.0.1:29600"])
def test_an_endpoint_is_a_host_and_a_port(endpoint: str) -> None:
    assert parse_endpoint(endpoint) == JOINING.head_address


@pytest.mark.parametrize("endpoint", ["", "10.0.0.1", ":29600", "10.0.0.1:", "10.0.0.1:0", "10.0.0.1:65536", "a:b"])
def test_a_malformed_endpoint_is_refused(endpoint: str) -> None:
    with pytest.raises(UnusableInput, match=r"not an endpoint; use tcp://HOST:PORT"):
        parse_endpoint(endpoint)


@pytest.mark.parametrize("port", [-3, 80, 65_436, 99_999_999])
def test_a_port_without_99_ports_after_it_is_refused(port: int) -> None:
    with pytest.raises(UnusableInput, match=f"^--port {port}: must be between 1024 and 65435"):
        choose_own_address(JOINING.head_address, "10.0.0.2", port)


def test_the_address_of_a_node_defaults_to_the_runs_host_and_port() -> None:
    at = TcpAddress("127.0.0.1", 29_600)
    assert choose_own_address(at, "", 0) == at
    assert choose_own_address(at, "10.0.0.2", 29_700) == JOINING.own_address
