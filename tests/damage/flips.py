"""Changes one byte of a file at positions that a seed determines. Text files keep their syntax."""

import os
import random
from collections.abc import Iterator
from itertools import count
from pathlib import Path

TEXT_SUFFIXES = (".json", ".jsonl", ".toml", ".jinja", ".out", ".log")
_times_ns = count(1_000_000_000)  # each version has its own time, so that no cache serves an earlier version


def flip_file(path: Path, number: int, seed: int) -> Iterator[bytes]:
    """Write `number` damaged versions one after another, and finally the original."""
    original, chosen = path.read_bytes(), random.Random(f"{seed} {path.name}")
    try:
        for _ in range(number if original else 0):
            damaged = flip(original, chosen, is_text=path.suffix in TEXT_SUFFIXES)
            write(path, damaged)
            yield damaged
    finally:
        write(path, original)


def flip(content: bytes, chosen: random.Random, *, is_text: bool) -> bytes:
    """Replace a digit of a text by another digit. In other content, flip a bit of a byte."""
    damaged = bytearray(content)
    digits = [place for place, byte in enumerate(content) if chr(byte).isdigit() and byte < 128] if is_text else []
    if digits:
        place = chosen.choice(digits)
        damaged[place] = chosen.choice([each for each in b"0123456789" if each != content[place]])
    else:
        damaged[chosen.randrange(len(content))] ^= 1 << chosen.randrange(8)
    return bytes(damaged)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    time_ns = next(_times_ns)
    os.utime(path, ns=(time_ns, time_ns))
