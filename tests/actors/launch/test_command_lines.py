"""The command line of learner ranks has flags for their rendezvous and their logs."""

from pathlib import Path

from asterism.actors.launch.command_lines import CommandLines, Rendezvous
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from tests.engine.learner.learner_settings import make_learner

FOLDER = RunFolder(Path("runs/demo"))
COMMANDS = CommandLines(RunConfig("demo", learner=make_learner(ranks=2)), FOLDER, launch=1)


def option(argv: list[str], name: str) -> str:
    return argv[argv.index(name) + 1]


def test_ranks_of_one_node_meet_on_loopback_and_log_next_to_the_sockets() -> None:
    argv = COMMANDS.build_learner_argv(step=0, incarnation=1)
    assert "--standalone" in argv
    assert option(argv, "--local-addr") == "127.0.0.1"
    assert FOLDER.sockets in Path(option(argv, "--log-dir")).parents


def test_ranks_of_several_nodes_meet_at_their_rendezvous() -> None:
    rendezvous = Rendezvous(TcpAddress("10.0.0.1", 29_791), node_rank=1, num_nodes=2)
    argv = COMMANDS.build_learner_argv(step=0, incarnation=1, rendezvous=rendezvous)
    assert "--standalone" not in argv
    values = [option(argv, name) for name in ("--nnodes", "--node-rank", "--master-addr", "--master-port")]
    assert values == ["2", "1", "10.0.0.1", "29791"]
