"""Construction of the command lines of a node's processes."""

import sys
from collections.abc import Sequence
from typing import NamedTuple

from asterism.bus.addresses import name_learner_rank
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig
from asterism.tasks.prepare_program import PREPARE

WEIGHT_SERVER_PORT_OFFSET = 88  # offset from a node's first port; processes on the bus use the ports below
RENDEZVOUS_PORT_OFFSET, NUM_RENDEZVOUS_PORTS = 90, 10
_INCARNATIONS_PER_LAUNCH = 1 << 20  # bound on the incarnations of one process


def compute_link_epoch(launch: int, incarnation: int = 0) -> int:
    """Return the epoch of a process's links: a later incarnation has a higher epoch."""
    return launch * _INCARNATIONS_PER_LAUNCH + incarnation


class Rendezvous(NamedTuple):
    """Meeting point of the ranks of one learner incarnation, if they run on several nodes."""

    address: TcpAddress
    node_rank: int
    num_nodes: int


def list_heartbeat_senders(ranks_per_node: int, node_rank: int, num_nodes: int) -> Sequence[str]:
    """Return the names of the ranks that a learner node starts."""
    first, num_ranks = node_rank * ranks_per_node, num_nodes * ranks_per_node
    return [name_learner_rank(rank, num_ranks) for rank in range(first, first + ranks_per_node)]


class CommandLines:
    def __init__(self, run: RunConfig, folder: RunFolder, launch: int) -> None:
        """`launch` counts the launches of the run, from 1."""
        self._run = run
        self._folder = folder
        self._launch = launch

    def build_prepare_argv(self) -> list[str]:
        return self._build_argv("asterism.actors.process", PREPARE)

    def build_worker_argv(self, name: str, incarnation: int) -> list[str]:
        return self._build_argv("asterism.actors.process", name, *self._build_incarnation_flags(incarnation))

    def build_decider_argv(self, name: str, step: int, incarnation: int) -> list[str]:
        """Build the command line. A decider resumes where the killed one stopped, so incarnations share the epoch."""
        flags = ("--incarnation", str(incarnation), "--epoch", str(compute_link_epoch(self._launch)))
        return self._build_argv("asterism.actors.process", name, "--step", str(step), *flags)

    def build_weight_server_argv(self, incarnation: int) -> list[str]:
        cluster = self._run.cluster
        port = str(cluster.port + WEIGHT_SERVER_PORT_OFFSET)
        flags = ("--host", cluster.host, "--port", port, "--key", cluster.key, "--incarnation", str(incarnation))
        return self._build_argv("asterism.engine.weight_transfer.weight_server", *flags)

    def build_learner_argv(self, step: int, incarnation: int, rendezvous: Rendezvous | None = None) -> list[str]:
        """Build the command line. Incarnation 1 resumes from the launch's step, a later one from the newest checkpoint.

        torchrun starts several ranks; a single rank saves the seconds that torchrun takes.
        """
        first = ("--resume-step", str(step)) if incarnation == 1 else ()
        flags = (*first, *self._build_incarnation_flags(incarnation))
        if rendezvous is None and self._run.learner.ranks == 1:
            return self._build_argv("asterism.engine.learner", *flags)
        return self._build_argv(
            *("torch.distributed.run", "--nproc-per-node", str(self._run.learner.ranks)),
            *_build_rendezvous_flags(rendezvous),
            # Without --log-dir torchrun leaves a folder in the system's temporary folder.
            *("--log-dir", str(self._folder.sockets / "torchrun")),
            # Each rank dies with torchrun's agent.
            *("--no-python", sys.executable, "-P", "-m", "asterism.bus.process.parent_death"),
            *(sys.executable, "-P", "-m", "asterism.engine.learner", *flags),
        )

    def _build_incarnation_flags(self, incarnation: int) -> tuple[str, ...]:
        """Give each incarnation a new epoch, because it has no state of the killed incarnation's links."""
        return "--incarnation", str(incarnation), "--epoch", str(compute_link_epoch(self._launch, incarnation))

    def _build_argv(self, module: str, *arguments: str) -> list[str]:
        folder = ("--run-folder", str(self._folder.path))
        scratch = ("--scratch", self._folder.scratch) if self._folder.scratch else ()
        # -P: a file of the user in the current folder, such as tasks.py, must not replace a package.
        return [sys.executable, "-P", "-m", module, *arguments, *folder, *scratch]


def _build_rendezvous_flags(rendezvous: Rendezvous | None) -> tuple[str, ...]:
    if rendezvous is None:  # without --local-addr torchrun uses the host's name, which may not resolve to this host
        return "--standalone", "--local-addr", "127.0.0.1"
    return (
        *("--nnodes", str(rendezvous.num_nodes), "--node-rank", str(rendezvous.node_rank)),
        *("--master-addr", rendezvous.address.host, "--master-port", str(rendezvous.address.port)),
    )
