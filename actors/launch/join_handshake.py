"""A new node joins: it sends JoinRequested to the launcher of node 0 and waits for JoinAccepted."""

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, NoReturn

from asterism.bus.addresses import LAUNCHER
from asterism.bus.bus import Bus
from asterism.bus.messages import Envelope, JoinAccepted, JoinRequested
from asterism.bus.process.waiting import wait_for_first
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.errors import UnusableInput
from asterism.configs.load import load_run
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.run_config import RunConfig

PrintLine = Callable[[str], None]

_WAIT_NOTICE_INTERVAL_S = 10.0  # interval of lines that report the missing answer


class JoinOptions(NamedTuple):
    """Options of a node and of the run that it joins."""

    head_address: TcpAddress  # address at which the run's launcher listens
    own_address: TcpAddress
    key_file: Path
    num_generators: int = -1  # -1: number of the run's configuration
    num_executors: int = -1
    run_folder: Path | None = None  # path of the run's folder on this node, if it differs from node 0's
    join_timeout_s: float = 300.0  # timeout of the join request

    @property
    def own_folder(self) -> RunFolder:
        """Return the folder of this node's sockets and memory, separate from other nodes on the same machine."""
        return RunFolder(
            Path(), f"{self.own_address.format_endpoint('control')} of {self.head_address.format_endpoint('control')}"
        )


async def request_join(
    name: str, bus: Bus, options: JoinOptions, print_line: PrintLine, interrupted: asyncio.Event
) -> JoinAccepted | None:
    """Request to join and return the answer, or return None if the wait was interrupted or timed out."""
    own = options.own_address
    await bus.send(LAUNCHER, JoinRequested(name, own.host, own.port, options.num_generators, options.num_executors))
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(options.join_timeout_s):
            notices = _print_wait_notices(options, print_line)
            answer = await wait_for_first(bus.receive(), interrupted.wait(), notices)
            if isinstance(answer, Envelope):
                message = answer.message
                assert isinstance(message, JoinAccepted), f"{type(message).__name__} arrived before JoinAccepted"
                return message
    return None


async def _print_wait_notices(options: JoinOptions, print_line: PrintLine) -> NoReturn:
    at = options.head_address.format_endpoint("control")
    while True:
        await asyncio.sleep(_WAIT_NOTICE_INTERVAL_S)
        print_line(f"no answer yet from {at}: no launcher listens there, or it has another key than {options.key_file}")


def open_run_folder(accepted: JoinAccepted, options: JoinOptions) -> tuple[RunConfig, RunFolder]:
    """Return the run's folder as this node sees it. Raises UnusableInput if it belongs to another run."""
    folder = RunFolder(options.run_folder or Path(accepted.run_folder), options.own_folder.scratch)
    launch = folder.launch_counter.read_text().strip() if folder.launch_counter.exists() else ""
    if launch != str(accepted.launch):
        raise UnusableInput(
            f"{folder.path}: not the folder of the run at {options.head_address.format_endpoint('control')}. "
            "All nodes need the run's folder on a shared file system; set its path on this node with --run-folder"
        )
    return load_run(folder.config), folder
