"""The command lines of a node's processes."""

from __future__ import annotations

from pathlib import Path

from actors.commands import Commands, Meeting
from bus.book import Address
from configs.run_folder import RunFolder
from configs.schema import Run

FOLDER = RunFolder(Path("runs/demo"))
COMMANDS = Commands(Run("demo"), FOLDER, boot=1)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_ranks_of_one_node_meet_on_its_loopback_whatever_its_name_leads_to() -> None:
    alone = COMMANDS.learner(step=0, life=1)
    assert "--standalone" in alone
    assert option(alone, "--local-addr") == "127.0.0.1"


def test_what_torchrun_writes_goes_with_the_sockets() -> None:
    assert FOLDER.sockets in Path(option(COMMANDS.learner(step=0, life=1), "--log-dir")).parents


def test_ranks_of_several_nodes_meet_where_they_are_told() -> None:
    spread = COMMANDS.learner(step=0, life=1, meeting=Meeting(Address("10.0.0.1", 29_791), node_rank=1, nodes=2))
    assert "--standalone" not in spread
    told = [option(spread, name) for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")]
    assert told == ["2", "1", "10.0.0.1", "29791"]
