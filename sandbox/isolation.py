"""Which isolation is in force, in sentences for the log, the summary and `asterism doctor`."""

from __future__ import annotations

from sandbox.contract import Isolation
from sandbox.inside.frames import Frame

_REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces=15000, "
    "kernel.apparmor_restrict_unprivileged_userns=0, kernel.unprivileged_userns_clone=1), or run as root."
)
_SHARED_VIEW = (
    "Executed code sees the machine's files and processes as its user may, can fill the disk that holds its folder, "
    "and can outlive the executor: "
)
_SHARED_MACHINE = "Executed code can fill the disk that holds its folder, see which files and processes exist, and outlive the executor: "
_SHARED_SIGNALS = "Executed code can end other processes of its user: use Linux 6.12 or newer, or "
_SIGNALS_SINCE = 6  # version of Landlock


def in_words(isolation: Isolation) -> str:
    """What is in force, on one line."""
    namespaces = ", ".join(isolation.namespaces) or "none"
    landlock = f"version {isolation.landlock}" if isolation.landlock else "off"
    seccomp = "on" if isolation.seccomp else "off"
    return f"{isolation.backend}; namespaces: {namespaces}; seccomp: {seccomp}; Landlock: {landlock}"


def isolation_of(greeting: Frame, refusal: str | None, backend: str, host_lacks: tuple[str, ...]) -> Isolation:
    """`host_lacks` are the host's own sentences; `refusal` is why the kernel allowed no namespaces, None where it did or they are switched off."""
    missing = list(greeting["missing"])
    if refusal is not None:
        missing.append(f"No namespaces: {refusal}.")
    elif not greeting["namespaces"]:
        missing.append('No namespaces: sandbox.namespaces = "off"; set it to "auto".')
    if not greeting["namespaces"]:
        missing += _shared(greeting["landlock"])
    missing += host_lacks
    return Isolation(
        backend=backend,
        namespaces=tuple(greeting["namespaces"]),
        seccomp=not any(sentence.startswith("No seccomp") for sentence in missing),
        missing=tuple(missing),
        landlock=greeting["landlock"],
    )


def _shared(landlock: int) -> list[str]:
    """What a call without namespaces shares with the machine, under this version of Landlock's rules."""
    if not landlock:
        return [_SHARED_VIEW + _REMEDY]
    shared = [_SHARED_MACHINE + _REMEDY]
    return shared if landlock >= _SIGNALS_SINCE else [*shared, _SHARED_SIGNALS + _REMEDY]
