"""Describes the isolation in force, in sentences for the log, the summary and `asterism doctor`."""

from asterism.sandbox.contract import Isolation
from asterism.sandbox.inside.wire.frames import Frame

_REMEDY = (
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces=15000, "
    "kernel.apparmor_restrict_unprivileged_userns=0, kernel.unprivileged_userns_clone=1), or run as root."
)
_SHARED_VIEW = (
    "Executed code can read the files and processes that its user may read, fill the disk that holds its folder, "
    "and outlive the executor: "
)
_SHARED_MACHINE = (
    "Executed code can fill the disk that holds its folder, list files and processes, and outlive the executor: "
)
_SHARED_SIGNALS = "Executed code can kill other processes of its user: use Linux 6.12 or newer, or "
_SIGNALS_ABI = 6  # first Landlock ABI that blocks signals to other processes


def format_isolation(isolation: Isolation) -> str:
    """Return the protections in force, on one line."""
    namespaces = ", ".join(isolation.namespaces) or "none"
    landlock = f"version {isolation.landlock}" if isolation.landlock else "off"
    seccomp = "on" if isolation.seccomp else "off"
    memory = "a cgroup per call" if isolation.call_cgroups else "measured, no cgroups"
    users = "one per call" if isolation.kernel_users else "shared"
    return (
        f"{isolation.backend}; namespaces: {namespaces}; seccomp: {seccomp}; Landlock: {landlock}; "
        f"kernel users: {users}; memory: {memory}"
    )


def build_isolation(greeting: Frame, refusal: str | None, backend: str, host_missing: tuple[str, ...]) -> Isolation:
    """Describe a sandbox. `host_missing`: the host's sentences; `refusal`: why the kernel refused namespaces."""
    missing = list(greeting["missing"])
    if refusal is not None:
        missing.append(f"No namespaces: {refusal}.")
    elif not greeting["namespaces"]:
        missing.append('No namespaces: sandbox.namespaces = "off"; set it to "auto".')
    if not greeting["namespaces"]:
        missing += _list_shared_resources(greeting["landlock"])
    missing += host_missing
    return Isolation(
        backend=backend,
        namespaces=tuple(greeting["namespaces"]),
        seccomp=not any(sentence.startswith("No seccomp") for sentence in missing),
        missing=tuple(missing),
        landlock=greeting["landlock"],
        call_cgroups=greeting["call_cgroups"],
        kernel_users=greeting["kernel_users"],
    )


def _list_shared_resources(landlock: int) -> list[str]:
    """List the resources that a call without namespaces shares with the machine, under this Landlock ABI."""
    if not landlock:
        return [_SHARED_VIEW + _REMEDY]
    shared = [_SHARED_MACHINE + _REMEDY]
    return shared if landlock >= _SIGNALS_ABI else [*shared, _SHARED_SIGNALS + _REMEDY]
