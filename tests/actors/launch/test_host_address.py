"""These tests find this host's address and interface; they use only the loopback network."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from asterism.actors.launch.host_address import find_host_address, find_interface
from asterism.configs.errors import UnusableInput

PORT = 29_700


@pytest.mark.parametrize("peer", ["127.0.0.1", "localhost"])
def test_a_loopback_peer_gives_the_loopback_address(peer: str):
    assert find_host_address(peer, PORT) == "127.0.0.1"


def test_nothing_is_sent_to_find_the_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        assert find_host_address("127.0.0.1", listener.getsockname()[1]) == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def test_the_interface_of_an_address_is_found():
    assert "lo" in dict(socket.if_nameindex()).values()
    assert find_interface("127.0.0.1") == "lo"


@pytest.mark.parametrize("address", ["255.255.255.255", "node03", ""])
def test_an_address_without_an_interface_is_refused_with_the_available_ones(address: str):
    with pytest.raises(UnusableInput, match=rf"^{address}: no network interface .* available: .*lo 127\.0\.0\.1"):
        find_interface(address)


def test_an_interface_without_an_address_is_skipped(monkeypatch: pytest.MonkeyPatch):
    interfaces = socket.if_nameindex()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(0, "no-such-one"), *interfaces])
    assert find_interface("127.0.0.1") == "lo"


class UnreachableSocket:
    """A socket with an unreachable peer, or with a peer that resolves to this host's loopback address."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def __enter__(self) -> UnreachableSocket:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self._failure:
            raise self._failure

    def getsockname(self) -> tuple[str, int]:
        return "127.0.1.1", 40_000


@pytest.mark.parametrize(
    ("failure", "message"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "node03: Name or service not known"),
        (OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)), "node03: Network is unreachable"),
    ],
)
def test_an_unreachable_host_is_named(monkeypatch: pytest.MonkeyPatch, failure: Exception, message: str):
    monkeypatch.setattr(socket, "socket", lambda *_: UnreachableSocket(failure))
    with pytest.raises(UnusableInput, match=f"^{message}$"):
        find_host_address("node03", PORT)


def test_an_invalid_host_name_is_refused():
    with pytest.raises(UnusableInput, match=r"^node\.\.03: "):
        find_host_address("node..03", PORT)


def test_a_name_that_resolves_to_loopback_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "socket", lambda *_: UnreachableSocket(None))
    with pytest.raises(
        UnusableInput, match=r"node03: .* to 127\.0\.1\.1 here, .*cluster\.host=ADDRESS.*--host ADDRESS"
    ):
        find_host_address("node03", PORT)
