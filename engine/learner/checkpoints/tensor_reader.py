"""Reads files of torch.distributed.checkpoint (DCP), after checks of their digests and of the metadata's classes.

DCP pickles its metadata, and unpickling can call any function. The unpickler here allows only the classes of metadata
about tensors. It also refuses metadata about pickled objects, because DCP would unpickle these objects.
"""

import pickle
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from asterism.configs.file_manifest import DamagedFile, check_folder, read_manifest
from asterism.engine.hf.weight_files import CheckpointError
from asterism.engine.learner.distributed import RankGroup

_METADATA = "torch.distributed.checkpoint.metadata"
_ALLOWED = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING")),
    *((_METADATA, name) for name in ("TensorProperties", "TensorStorageMetadata", "ChunkStorageMetadata")),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch", "Size"),
}


class TensorReader(FileSystemReader):
    """A reader that raises CheckpointError, with the file, for metadata that does not describe DCP's tensors."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self._get_metadata_path(kwargs.get("rank")))
        try:
            with path.open("rb") as file:
                metadata = _MetadataUnpickler(file).load()
            _check_metadata(metadata)
        except OSError as error:
            raise CheckpointError(f"{path}: {error.strerror}") from error
        except Exception as error:  # damaged pickles raise errors of any type
            raise CheckpointError(f"{path}: refused: {type(error).__name__}: {error}") from error
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype):
            return getattr(torch, global_name)
        if (module_name, global_name) == ("builtins", "getattr"):  # Python 3.11.0 to 3.11.3 pickle enums by getattr
            return _get_member
        if (module_name, global_name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"{module_name}.{global_name} is no class of tensor metadata")
        return super().find_class(module_name, global_name)


def _get_member(kind: Any, name: str) -> Enum:
    """Return a member of an enum; raise UnpicklingError for an attribute of any other object."""
    if not (isinstance(kind, type) and issubclass(kind, Enum)):
        raise pickle.UnpicklingError(f"{name} of {kind!r} is no member of an enum")
    return kind[name]


def _check_metadata(metadata: Any) -> None:
    """Raise TypeError unless the object is Metadata, and ValueError for tensor files outside of its folder."""
    if not isinstance(metadata, Metadata):
        raise TypeError(f"{type(metadata).__name__} instead of Metadata")
    for index, place in metadata.storage_data.items():
        if Path(place.relative_path).name != place.relative_path:
            raise ValueError(f"{index.fqn} is in {place.relative_path}, outside of the folder")


def check_tensor_files(checkpoint: Path, folder: Path, ranks: RankGroup) -> None:
    """Check the files of `folder` by the checkpoint's manifest before a rank uses them. Every rank calls it.

    Each rank reads its share of the files; all ranks raise DamagedFile for the same file.
    """
    group, damage = ranks.checkpoint_group, _find_damage_in_share(checkpoint, folder, ranks)
    found: list[str | None] = [damage] * ranks.world_size
    if group is not None:
        with ranks.operation("check of the checkpoint", is_limited=False):
            dist.all_gather_object(found, damage, group)
    for text in found:
        if text is not None:
            raise DamagedFile(text)


def _find_damage_in_share(checkpoint: Path, folder: Path, ranks: RankGroup) -> str | None:
    try:
        manifest = read_manifest(checkpoint)
        prefix = f"{folder.relative_to(checkpoint).as_posix()}/"
        names = sorted(name for name in (manifest.files if manifest else ()) if name.startswith(prefix))
        check_folder(checkpoint, names[ranks.rank :: ranks.world_size])
    except DamagedFile as error:
        return str(error)
    return None
