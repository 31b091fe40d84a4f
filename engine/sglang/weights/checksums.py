"""Compares the checksums of a server with those of the published weights, and of other servers.

A server hashes the parameters that it computes with: fused, sharded and padded for its kernels. The registry compares
a sample of them with the published weights (server_parameters.py), and all of them with another server that loaded the
same weights: another replica, another engine on this machine, or an earlier incarnation of this engine.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure
from asterism.engine.sglang.http_api import RankChecksums, ServerInfo


class ChecksumRegistry:
    """Checksums of all engines of a machine: a file per version, written by the first engine with this version."""

    def __init__(self, folder: Path, name: str) -> None:
        """`name`: the name of this engine."""
        self._folder, self._name = folder, name

    def verify(
        self,
        weights: WeightsPublished,
        server: ServerInfo,
        ranks: Sequence[RankChecksums],
        expected: Sequence[Mapping[str, str]] = (),
    ) -> None:
        """Compare the checksums. Raises EngineFailure, which names the parameter, ranks or engines that differ.

        `expected`: checksums of some parameters, by tensor-parallel rank.
        """
        if expected:
            self._compare_with_published(weights, ranks, expected)
        checksum_by_shard: dict[tuple[int, int], str] = {}
        for number, rank in enumerate(ranks):
            if checksum_by_shard.setdefault(rank.model_shard, rank.per_gpu_checksum) != rank.per_gpu_checksum:
                raise EngineFailure(
                    f"the model replicas of one server differ after version {weights.version}: rank {number} of "
                    f"{len(ranks)} has a different checksum"
                )
        checksum = hashlib.sha256(repr(sorted(checksum_by_shard.items())).encode()).hexdigest()[:16]
        first_engine, first = self._record_first(
            f"{weights.version}-{weights.digest[:16]}-{server.device}-{server.tp_size}", checksum
        )
        if first != checksum:
            raise EngineFailure(
                f"{first_engine} and {self._name} loaded the same version {weights.version} but hold different "
                f"weights: their checksums are {first} and {checksum}"
            )

    def _compare_with_published(
        self, weights: WeightsPublished, ranks: Sequence[RankChecksums], expected: Sequence[Mapping[str, str]]
    ) -> None:
        """Compare the checksums of each rank. A pipeline rank holds only the parameters of its layers."""
        held = {name for rank in ranks for name in rank.checksums}
        for number, rank in enumerate(ranks):
            for name, checksum in expected[rank.model_shard[0]].items():
                if name not in held:
                    raise EngineFailure(
                        f"{self._name} lacks {name}, which the learner published in version {weights.version}"
                    )
                if rank.checksums.get(name, checksum) != checksum:
                    raise EngineFailure(
                        f"{self._name} holds another {name} on rank {number} than the learner published in version "
                        f"{weights.version}: its checksum is {rank.checksums[name]} instead of {checksum}"
                    )

    def _record_first(self, key: str, checksum: str) -> tuple[str, str]:
        """Return the first engine that recorded a checksum under `key`, and this checksum."""
        file, mine = self._folder / key, self._folder / f"{key}.{self._name}"
        self._folder.mkdir(parents=True, exist_ok=True)
        mine.write_text(f"{self._name} {checksum}")
        with suppress(FileExistsError):
            os.link(mine, file)
        mine.unlink()
        first_engine, expected = file.read_text().split()
        return first_engine, expected
