"""Captures the text that code prints on a console."""

from collections.abc import Callable
from io import StringIO

from rich.console import Console


def capture(show: Callable[[Console], object], width: int = 140) -> str:
    """Return what `show` prints, without colors."""
    file = StringIO()
    show(Console(file=file, width=width, color_system=None))
    return file.getvalue()
