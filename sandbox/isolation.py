"""Which isolation is in force, in sentences for the log, the summary and `asterism doctor`."""

from __future__ import annotations

from sandbox.contract import Isolation
from sandbox.inside.frames import Frame

_LANDLOCK = "No Landlock rules: the read-only root without /proc, /sys and home folders stands in their place."
_SHARED_VIEW = (
    "Executed code sees the machine's files and other processes as its user may, and can outlive the executor: "
    "allow unprivileged user namespaces (sysctl user.max_user_namespaces=15000, "
    "kernel.apparmor_restrict_unprivileged_userns=0, kernel.unprivileged_userns_clone=1), or run as root."
)


def isolation_of(greeting: Frame, refusal: str | None, backend: str, host_lacks: tuple[str, ...]) -> Isolation:
    """`host_lacks` are the host's own sentences; `refusal` is why the kernel allowed no namespaces, None where it did or they are switched off."""
    missing = list(greeting["missing"])
    if refusal is not None:
        missing.append(f"No namespaces: {refusal}.")
    elif not greeting["namespaces"]:
        missing.append('No namespaces: sandbox.inside.namespaces = "off"; set it to "auto".')
    missing.append(_LANDLOCK if greeting["namespaces"] else _SHARED_VIEW)
    missing += host_lacks
    return Isolation(
        backend=backend,
        namespaces=tuple(greeting["namespaces"]),
        seccomp=not any(sentence.startswith("No seccomp") for sentence in missing),
        missing=tuple(missing),
    )
