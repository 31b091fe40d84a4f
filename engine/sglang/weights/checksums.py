"""Whether the servers of a machine hold the same after they were given the same weights, by their own checksums.

What a server hashes is what it computes with: fused, cut for its ranks, padded to what its kernels like. So nothing but
another server can say what the checksum has to be: another copy of the model behind it, another engine's, or an earlier
life's of this one.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bus.messages import WeightsPublished
from engine.contract import EngineFailure
from engine.sglang.protocol import RankChecksums, ServerInfo


class Checksums:
    """Noted in a folder that the engines of a machine share: a file for each version, by who held it first."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name` is this engine's."""
        self._folder, self._name = folder, name

    def compare(self, weights: WeightsPublished, server: ServerInfo, ranks: Sequence[RankChecksums]) -> None:
        """Raises EngineFailure, which names who differs."""
        parts: dict[tuple[int, int], str] = {}
        for number, rank in enumerate(ranks):
            if parts.setdefault(rank.part, rank.per_gpu_checksum) != rank.per_gpu_checksum:
                raise EngineFailure(
                    f"the copies of the model behind one server differ after version {weights.version}: rank {number} of "
                    f"{len(ranks)} has not what others have"
                )
        found = hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()[:16]
        holder, held = self._first(f"{weights.version}-{weights.digest[:16]}-{server.device}-{server.tp_size}", found)
        if held != found:
            raise EngineFailure(
                f"{holder} and {self._name} were given the same version {weights.version} and hold different weights: "
                f"their checksums are {held} and {found}"
            )

    def _first(self, key: str, found: str) -> tuple[str, str]:
        """Who noted a checksum first, and which."""
        file, mine = self._folder / key, self._folder / f"{key}.{self._name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(f"{self._name} {found}")
        with suppress(FileExistsError):
            os.link(mine, file)
        mine.unlink()
        holder, held = file.read_text().split()
        return holder, held
