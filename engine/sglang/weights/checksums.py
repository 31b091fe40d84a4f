"""Compares the checksums of servers that loaded the same weights.

A server hashes the parameters that it computes with: fused, sharded and padded for its kernels. So
the expected checksum can only come from another server: another replica, another engine on this
machine, or an earlier incarnation of this one.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from bus.messages import WeightsPublished
from engine.contract import EngineFailure
from engine.sglang.http_api import RankChecksums, ServerInfo


class ChecksumRegistry:
    """A folder for a machine's engines: a file per version, by the first engine that loads it."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: this engine's."""
        self._folder, self._name = folder, name

    def verify(self, weights: WeightsPublished, server: ServerInfo, ranks: Sequence[RankChecksums]) -> None:
        """Raises EngineFailure, which names the ranks or engines that differ."""
        checksum_by_shard: dict[tuple[int, int], str] = {}
        for number, rank in enumerate(ranks):
            if checksum_by_shard.setdefault(rank.model_shard, rank.per_gpu_checksum) != rank.per_gpu_checksum:
                raise EngineFailure(
                    f"the model replicas of one server differ after version {weights.version}: rank {number} of "
                    f"{len(ranks)} has a different checksum"
                )
        checksum = hashlib.sha256(repr(sorted(checksum_by_shard.items())).encode()).hexdigest()[:16]
        first_engine, expected = self._record_first(
            f"{weights.version}-{weights.digest[:16]}-{server.device}-{server.tp_size}", checksum
        )
        if expected != checksum:
            raise EngineFailure(
                f"{first_engine} and {self._name} loaded the same version {weights.version} but hold different "
                f"weights: their checksums are {expected} and {checksum}"
            )

    def _record_first(self, key: str, checksum: str) -> tuple[str, str]:
        """The first engine that recorded a checksum under `key`, and this checksum."""
        file, mine = self._folder / key, self._folder / f"{key}.{self._name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(f"{self._name} {checksum}")
        with suppress(FileExistsError):
            os.link(mine, file)
        mine.unlink()
        first_engine, expected = file.read_text().split()
        return first_engine, expected
