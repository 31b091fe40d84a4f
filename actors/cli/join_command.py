"""`asterism join` adds this machine to a run that another machine started."""

import uvloop
from rich.console import Console
from rich.markup import escape

from asterism.actors.launch.child_processes import ProcessDied
from asterism.actors.launch.display import Display, PlainDisplay
from asterism.actors.launch.host_address import find_host_address
from asterism.actors.launch.join_handshake import JoinOptions
from asterism.actors.launch.membership import PORTS_PER_NODE
from asterism.actors.launch.node_agent import join_once
from asterism.bus.process.waiting import make_interrupt_event
from asterism.bus.transport.address_book import TcpAddress
from asterism.configs.errors import UnusableInput

EXIT_INTERRUPTED = 130  # exit code of a process that ^C ended, as a shell reports it


def parse_endpoint(endpoint: str) -> TcpAddress:
    """Parse `tcp://HOST:PORT` or `HOST:PORT`. Raises UnusableInput."""
    host, colon, port = endpoint.removeprefix("tcp://").rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65_536):
        raise UnusableInput(f"{endpoint}: not an endpoint; use tcp://HOST:PORT, as the run prints at its start")
    return TcpAddress(host, int(port))


def choose_own_address(run_address: TcpAddress, host: str, port: int) -> TcpAddress:
    """Return this machine's address. An empty `host` is detected; port 0 is the run's port. Raises UnusableInput."""
    if port and not 1024 <= port <= 65_535 - PORTS_PER_NODE:
        raise UnusableInput(
            f"--port {port}: must be between 1024 and {65_535 - PORTS_PER_NODE}; the 99 ports after it are used too"
        )
    return TcpAddress(host or find_host_address(run_address.host, run_address.port), port or run_address.port)


def join_run(joining: JoinOptions, console: Console) -> int:
    """Return the exit code: 0, 1 if a process died, 130 if interrupted. Raises UnusableInput."""
    display = PlainDisplay(console)
    try:
        return uvloop.run(_join(joining, display))
    except ProcessDied as error:
        console.print(f"[bold red]failed:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 1


async def _join(joining: JoinOptions, display: Display) -> int:
    interrupted = make_interrupt_event()
    at = joining.head_address.format_endpoint("control")
    display.print_line(f"joining the run at {at} from {joining.own_address.host}:{joining.own_address.port}")
    while (ending := await join_once(joining, display.print_line, interrupted)) == "lost":
        display.print_line(f"{at} stopped answering; joining again")
    if ending == "interrupted":
        return EXIT_INTERRUPTED
    if ending == "unanswered":
        raise UnusableInput(
            f"{at} has not answered for {joining.join_timeout_s:g} s: check that the run is up, that its port "
            f"is open, and that {joining.key_file} is the run's key"
        )
    display.print_line("the run is over")
    return 0
