"""The address and the interface by which others see this host, without any network but its own."""

from __future__ import annotations

import errno
import os
import socket

import pytest

from actors.hosts import host_address, interface_of
from configs.errors import UnusableInput

PORT = 29_700


@pytest.mark.parametrize("towards", ["127.0.0.1", "localhost"])
def test_towards_this_very_host_the_address_is_its_own(towards: str):
    assert host_address(towards, PORT) == "127.0.0.1"


def test_nothing_is_sent_to_find_the_address():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.setblocking(False)
        assert host_address("127.0.0.1", listener.getsockname()[1]) == "127.0.0.1"
        with pytest.raises(BlockingIOError):
            listener.recv(1)


def test_the_interface_of_an_address_is_found_by_it():
    assert "lo" in dict(socket.if_nameindex()).values()
    assert interface_of("127.0.0.1") == "lo"


@pytest.mark.parametrize("address", ["255.255.255.255", "node03", ""])
def test_an_address_that_no_interface_has_is_refused_with_those_there_are(address: str):
    with pytest.raises(UnusableInput, match=rf"^{address}: no network interface .* there are: .*lo 127\.0\.0\.1"):
        interface_of(address)


def test_an_interface_without_an_address_is_passed_over(monkeypatch: pytest.MonkeyPatch):
    known = socket.if_nameindex()
    monkeypatch.setattr(socket, "if_nameindex", lambda: [(0, "no-such-one"), *known])
    assert interface_of("127.0.0.1") == "lo"


class Nowhere:
    """A socket whose host cannot be reached, or whose name means this host alone."""

    def __init__(self, failure: Exception | None) -> None:
        self._failure = failure

    def __enter__(self) -> Nowhere:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def connect(self, address: tuple[str, int]) -> None:
        if self._failure:
            raise self._failure

    def getsockname(self) -> tuple[str, int]:
        return "127.0.1.1", 40_000


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), "node03: Name or service not known"),
        (OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH)), "node03: Network is unreachable"),
    ],
)
def test_a_host_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str):
    monkeypatch.setattr(socket, "socket", lambda *_: Nowhere(failure))
    with pytest.raises(UnusableInput, match=f"^{said}$"):
        host_address("node03", PORT)


def test_what_cannot_be_a_hosts_name_is_refused():
    with pytest.raises(UnusableInput, match=r"^node\.\.03: "):
        host_address("node..03", PORT)


def test_a_name_by_which_only_this_host_finds_itself_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(socket, "socket", lambda *_: Nowhere(None))
    with pytest.raises(UnusableInput, match=r"node03: .* as 127\.0\.1\.1, .*cluster\.host=ADDRESS.*--host ADDRESS"):
        host_address("node03", PORT)
