"""This host among others: the address under which they see it, and which network interface has it."""

from __future__ import annotations

import errno
import fcntl
import ipaddress
import socket
import struct

from configs.errors import UnusableInput

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface, by its name
_REQUEST = struct.Struct("16s2xH4s232x")  # struct ifreq: name, then a sockaddr_in of which port and address count
_NOT_THERE = (errno.EADDRNOTAVAIL, errno.ENODEV)  # without an IPv4 address, or gone since it was listed


def host_address(towards: str, port: int) -> str:
    """The IPv4 address of this host from which it would speak to `towards`, a name or an address; nothing is sent.

    Raises UnusableInput where there is no such host, no way to it, or where a name that others know means this host alone.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((towards, port))
            address = str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:  # UnicodeError: a name that cannot be one
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UnusableInput(f"{towards}: {reason}") from None
    if ipaddress.ip_address(address).is_loopback and not _is_loopback(towards):
        raise UnusableInput(
            f"{towards}: this host knows itself by that name as {address}, where no other reaches it; "
            "name its address, by --set cluster.host=ADDRESS on node 0 and by --host ADDRESS elsewhere"
        )
    return address


def check_free(host: str, port: int, remedy: str) -> None:
    """Raises UnusableInput, with the remedy, where nobody can listen there: it is not this host, or somebody does."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnusableInput(f"tcp://{host}:{port}: {error.strerror}; {remedy}") from error


def interface_of(address: str) -> str:
    """The name of the network interface with this IPv4 address. Raises UnusableInput if this host has none."""
    found: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if (its := _address_of(probe, name)) == address:
                return name
            found += [f"{name} {its}"] if its else []
    raise UnusableInput(f"{address}: no network interface of this host has it; there are: {', '.join(found) or 'none'}")


def _address_of(probe: socket.socket, interface: str) -> str | None:
    request = _REQUEST.pack(interface.encode(), 0, b"")
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError as error:
        if error.errno in _NOT_THERE:
            return None
        raise
    _, _, address = _REQUEST.unpack(answer)
    return socket.inet_ntoa(address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def meeting_environment(host: str) -> dict[str, str]:
    """Has torch.distributed, in a process of this host, meet the other ranks at this address. Raises UnusableInput."""
    interface = interface_of(host)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
