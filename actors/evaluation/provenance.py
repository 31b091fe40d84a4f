"""Provenance identifies the weights and data of an evaluation by digests, fixed at its first start.

A resumed evaluation must have the same digests; otherwise its answers would be of two models, or on two data sets.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from asterism.actors.engines.checkpoint_argument import CheckpointArgument
from asterism.actors.evaluation.evaluation_run import DEFAULT_SET, hash_files
from asterism.configs.atomic_write import write_atomically
from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import EvaluationSetConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.data_files import list_data_files
from asterism.engine.hf.weight_files import list_weight_files


class Provenance(msgspec.Struct, frozen=True):
    weights: dict[str, Any]  # a checkpoint's folder, run, step and sha256 of its weight files; else the URLs and models
    data: dict[str, str]  # SHA-256 of the files of each set, by name of the set


def compute_provenance(
    run: RunConfig, weights: Sequence[CheckpointArgument], served: Mapping[str, Any] | None = None
) -> Provenance:
    """Compute the digests of weights and data. `served` is asterism.engine.engine_code.EvaluatedModels.description.

    Reads all weight files, about a second per GB. Raises UnusableInput for a missing file.
    """
    sets = [each for each in run.resolved_evaluation_sets if each.data]
    data = {name_set(each): hash_files(list_data_files(Path(each.data))) for each in sets}
    return Provenance(describe_weights(weights, served), data)


def name_set(config: EvaluationSetConfig) -> str:
    """Return the set's name, or the name of its task."""
    return config.name or config.task or DEFAULT_SET


def describe_weights(weights: Sequence[CheckpointArgument], served: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Digest the checkpoint, or name the URLs and the models that they serve."""
    first = weights[0]
    if first.folder is None:
        return {"urls": [each.url for each in weights], **(served or {})}
    digest = hash_files(list_weight_files(first.folder))
    run = str(first.run.path) if first.run is not None else None
    return {"folder": str(first.folder), "run": run, "step": first.step, "sha256": digest}


def name_model(run: RunConfig, provenance: Provenance) -> str:
    """Return the model's name at its servers, or the folder of its checkpoint."""
    servers = provenance.weights.get("servers", {})
    return provenance.weights.get("model") or next(
        (model["model_path"] for model in servers.values()), run.model.checkpoint
    )


def keep_provenance(folder: RunFolder, present: Provenance) -> None:
    """Write the digests at the first start. Raises UnusableInput if a resumed evaluation has other weights or data."""
    path = folder.provenance
    if not path.exists():
        write_atomically(path, msgspec.json.format(msgspec.json.encode(present)) + b"\n")
        return
    check_file(path)
    before = msgspec.json.decode(path.read_bytes(), type=Provenance)
    changed = [
        f"evaluation.sets.{name}.data" for name, digest in present.data.items() if before.data.get(name) != digest
    ]
    if before.weights != present.weights:
        changed.insert(0, "model.checkpoint")
    if changed:
        raise UnusableInput(
            f"{folder.path}: the content of {' and '.join(changed)} has changed since this evaluation began; "
            "restore it, or start another evaluation with --name"
        )
