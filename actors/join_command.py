"""`asterism join`: this machine takes part in a run that began on another one."""

from __future__ import annotations

import asyncio
import signal

import uvloop
from rich.console import Console
from rich.markup import escape

from actors.children import ProcessDied
from actors.cluster import PORTS
from actors.display import Display, PlainDisplay
from actors.hosts import host_address
from actors.node import Joining, take_part
from bus.book import Address
from configs.errors import UnusableInput

INTERRUPTED = 130  # exit code, as a shell's after ^C


def address_of(endpoint: str) -> Address:
    """From `tcp://HOST:PORT` or `HOST:PORT`. Raises UnusableInput."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
        raise UnusableInput(f"{endpoint}: an endpoint is tcp://HOST:PORT, as the run says when it begins")
    return Address(host, int(port))


def own_address(at: Address, host: str, port: int) -> Address:
    """Where this node's processes listen: what is not given follows from the run's own address. Raises UnusableInput."""
    if port and not 1024 <= port <= 65_535 - PORTS:
        raise UnusableInput(
            f"--port {port}: it must lie between 1024 and {65_535 - PORTS}, since 99 further ones are used"
        )
    return Address(host or host_address(at.host, at.port), port or at.port)


def join_run(joining: Joining, console: Console) -> int:
    """The exit code: 0 the run is over, 1 it could not go on here, 130 interrupted. Raises UnusableInput."""
    display = PlainDisplay(console)
    try:
        return uvloop.run(_join(joining, display))
    except ProcessDied as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1


async def _join(joining: Joining, display: Display) -> int:
    interrupted = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, interrupted.set)
    at = joining.at.of("control")
    display.say(f"joining the run at {at} from {joining.own.host}:{joining.own.port}")
    while (ending := await take_part(joining, display.say, interrupted)) == "lost":
        display.say(f"{at} has fallen silent; joining again")
    if ending == "interrupted":
        return INTERRUPTED
    if ending == "unheard":
        raise UnusableInput(
            f"{at} has not answered for {joining.patience_s:g} s: is the run there, is its port open, and is {joining.key} "
            "the key that it was begun with?"
        )
    display.say("the run is over")
    return 0
