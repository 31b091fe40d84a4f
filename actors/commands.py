"""The command lines of a node's processes."""

from __future__ import annotations

import sys
from typing import NamedTuple

from bus.book import Address
from configs.run_folder import RunFolder
from configs.schema import Run

WEIGHTS_PORT = 88  # counted from a node's first one; below it are those of processes on the bus
MEETING_PORT, MEETINGS = 90, 10
_LIVES = 1 << 20  # of one process in one launch


def session_of(boot: int, life: int = 0) -> int:
    """What a process's links go by: of two lives of a process, the later one has the higher session."""
    return boot * _LIVES + life


class Meeting(NamedTuple):
    """Where the ranks of one life of the learner meet that are spread over nodes."""

    at: Address
    node_rank: int
    nodes: int


class Commands:
    def __init__(self, run: Run, folder: RunFolder, boot: int) -> None:
        """`boot` counts the launches of the run."""
        self._run = run
        self._folder = folder
        self._boot = boot

    def prepare(self) -> list[str]:
        return self._program("engine.tiny.prepare")

    def process(self, name: str, life: int) -> list[str]:
        return self._program("actors.process", name, *self._lives(life, session_of(self._boot, life)))

    def deciding(self, name: str, step: int, life: int) -> list[str]:
        """In the session of the launch: whoever decides goes on where its last life was killed."""
        lives = self._lives(life, session_of(self._boot))
        return self._program("actors.process", name, "--step", str(step), *lives)

    def weights(self, life: int) -> list[str]:
        cluster = self._run.cluster
        where = ("--host", cluster.host, "--port", str(cluster.port + WEIGHTS_PORT), "--key", cluster.key)
        return self._program("engine.weight_server", *where, "--life", str(life))

    def learner(self, step: int, life: int, meeting: Meeting | None = None) -> list[str]:
        """Its first life goes on from the step of the launch, a later one from the newest checkpoint."""
        first = ("--resume-step", str(step)) if life == 1 else ()
        return self._program(
            *("torch.distributed.run", "--nproc-per-node", str(self._run.learner.ranks), *_where(meeting)),
            *("--log-dir", str(self._folder.sockets / "torchrun")),  # else it leaves one behind in a folder for all
            *("--no-python", sys.executable, "-m", "bus.death"),  # each rank dies with torchrun's agent
            *(sys.executable, "-m", "engine.learner", *first, *self._lives(life, session_of(self._boot, life))),
        )

    def _lives(self, life: int, session: int) -> tuple[str, ...]:
        return "--life", str(life), "--session", str(session)

    def _program(self, module: str, *arguments: str) -> list[str]:
        folder = ("--run-folder", str(self._folder.path))
        scratch = ("--scratch", self._folder.scratch) if self._folder.scratch else ()
        return [sys.executable, "-m", module, *arguments, *folder, *scratch]


def _where(meeting: Meeting | None) -> tuple[str, ...]:
    if meeting is None:
        return "--standalone", "--local-addr", "127.0.0.1"  # a host's name need not lead to it
    return (
        *("--nnodes", str(meeting.nodes), "--node-rank", str(meeting.node_rank)),
        *("--master-addr", meeting.at.host, "--master-port", str(meeting.at.port)),
    )
