"""These functions find the address at which other hosts reach this one, and its network interface."""

import errno
import fcntl
import ipaddress
import socket
import struct

from asterism.configs.errors import UnusableInput

_SIOCGIFADDR = 0x8915  # linux/sockios.h: reads the IPv4 address of an interface, by its name
_IFREQ = struct.Struct("16s2xH4s232x")  # struct ifreq: name, then port and address of a sockaddr_in
_NO_ADDRESS_ERRORS = (errno.EADDRNOTAVAIL, errno.ENODEV)  # no IPv4 address, or the interface is removed


def find_host_address(peer: str, port: int) -> str:
    """Return the IPv4 address of this host on its route to `peer`, a name or an address; nothing is sent.

    Raises UnusableInput if `peer` is unknown, unreachable, or a name that resolves to a loopback address on this host.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((peer, port))
            address = str(probe.getsockname()[0])
        except (OSError, UnicodeError) as error:  # UnicodeError stands for an invalid name
            reason = error.strerror if isinstance(error, OSError) and error.strerror else error
            raise UnusableInput(f"{peer}: {reason}") from None
    if ipaddress.ip_address(address).is_loopback and not _is_loopback(peer):
        raise UnusableInput(
            f"{peer}: this name resolves to {address} here, which no other host can reach; "
            "set the address with --set cluster.host=ADDRESS on node 0, and with --host ADDRESS on other nodes"
        )
    return address


def check_port_free(host: str, port: int, remedy: str) -> None:
    """Check the address. Raises UnusableInput, with the remedy, if it is not this host's or the port is in use."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise UnusableInput(f"tcp://{host}:{port}: {error.strerror}; {remedy}") from error


def find_interface(address: str) -> str:
    """Return the name of the network interface with this IPv4 address. Raises UnusableInput if this host has none."""
    interfaces: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if (candidate := _read_interface_address(probe, name)) == address:
                return name
            interfaces += [f"{name} {candidate}"] if candidate else []
    available = ", ".join(interfaces) or "none"
    raise UnusableInput(f"{address}: no network interface of this host has this address; available: {available}")


def _read_interface_address(probe: socket.socket, interface: str) -> str | None:
    request = _IFREQ.pack(interface.encode(), 0, b"")
    try:
        answer = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)
    except OSError as error:
        if error.errno in _NO_ADDRESS_ERRORS:
            return None
        raise
    _, _, address = _IFREQ.unpack(answer)
    return socket.inet_ntoa(address)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def build_rendezvous_environment(host: str) -> dict[str, str]:
    """Build variables with which torch.distributed uses this address's network interface. Raises UnusableInput."""
    interface = find_interface(host)
    return {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}
