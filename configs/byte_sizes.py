"""Sizes in bytes as texts."""

KIB, MIB, GIB = 2**10, 2**20, 2**30
_LEAST_MIB = 0.1  # smaller sizes are in KiB: two decimals of MiB would show little of them


def format_bytes(num_bytes: float) -> str:
    """Return the size in the largest unit that shows it, such as "1.75 MiB" or "23.54 GiB"."""
    size = abs(num_bytes)
    if size >= GIB:
        return f"{num_bytes / GIB:,.2f} GiB"
    if size >= _LEAST_MIB * MIB or not size:
        return f"{num_bytes / MIB:,.2f} MiB"
    return f"{num_bytes / KIB:,.2f} KiB"
