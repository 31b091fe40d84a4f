"""How a process of a run comes onto its bus: over ZeroMQ, or among others in the same process."""

from __future__ import annotations

from collections.abc import Callable

from bus.book import network_of
from bus.in_process import Hub
from bus.transport import Bus
from bus.zeromq import zmq_bus
from configs.run_folder import RunFolder
from configs.schema import Run

Join = Callable[[str, int], Bus]  # by the process's name and the session of its links; within a running event loop


def over_zeromq(run: Run, folder: RunFolder) -> Join:
    """On this machine and, where the run has a cluster's book, on others."""
    return lambda process, session: zmq_bus(
        process, folder.sockets, run.bus.queue_messages, session, network_of(folder.sockets)
    )


def in_process(run: Run, hub: Hub) -> Join:
    return lambda process, session: hub.join(process, run.bus.queue_messages, session)
