"""Manifests list the digests of a folder's finished files; they are written last, and checked before a file is used.

FOLDER/asterism-manifest.json
    {"version": 1, "algorithm": "xxh3_128", "files": {"trainer/state.json": "DIGEST", ...}}

A digest finds damage, not forgery, because an attacker can write the manifest too. A folder without a manifest, such as
one of an older version, is not checked.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import repeat
from pathlib import Path

import msgspec
import xxhash

from asterism.configs.atomic_write import sync_paths, write_atomically
from asterism.configs.errors import UnusableInput

MANIFEST_NAME = "asterism-manifest.json"  # a name that no other program uses in a folder of data
_VERSION, _ALGORITHM = 1, "xxh3_128"
_BLOCK_BYTES = 128 << 10
_MAX_THREADS = 8
_MAX_DEPTH = 3  # depth of a listed file below the manifest


class DamagedFile(UnusableInput):
    """A file differs from its manifest. The message names the file and the remedy."""


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    version: int
    algorithm: str
    files: dict[str, str]  # digest by path relative to the manifest's folder


def digest_file(path: Path) -> str:
    """Return the digest of the file, which is read in blocks. Raises OSError."""
    digest, block = xxhash.xxh3_128(), bytearray(_BLOCK_BYTES)
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(block):
            digest.update(memoryview(block)[:size])
    return digest.hexdigest()


def digest_files(folder: Path, files: Iterable[Path]) -> dict[str, str]:
    """Return digests by path relative to `folder`; reads several files at once. Raises OSError."""
    names = {path.relative_to(folder).as_posix(): path for path in files}
    with ThreadPoolExecutor(_count_threads(len(names))) as threads:
        return dict(zip(names, threads.map(digest_file, names.values()), strict=True))


def write_manifest(folder: Path, files: Iterable[Path], known: Mapping[str, str] | None = None) -> None:
    """Write the manifest after the files, atomically and to the disk. `known`: known digests by relative path.

    Raises OSError and DiskError.
    """
    known = known or {}
    unread = (path for path in files if path.relative_to(folder).as_posix() not in known)
    digests = {**known, **digest_files(folder, unread)}
    manifest = Manifest(_VERSION, _ALGORITHM, dict(sorted(digests.items())))
    path = folder / MANIFEST_NAME
    write_atomically(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
    path.chmod(0o644)
    sync_paths([path, folder])


def list_files(folder: Path) -> list[Path]:
    """List all files below the folder except its manifest, sorted."""
    found = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(path for path in found if path != folder / MANIFEST_NAME)


def read_manifest(folder: Path) -> Manifest | None:
    """Return the manifest, or None if there is none. Raises DamagedFile for an unreadable manifest."""
    path = folder / MANIFEST_NAME
    try:
        content = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        manifest = msgspec.json.decode(content, type=Manifest)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise DamagedFile(f"{path}: damaged: {error}; {_suggest_restoring(folder)}") from None
    if (manifest.version, manifest.algorithm) != (_VERSION, _ALGORITHM):
        raise DamagedFile(
            f"{path}: version {manifest.version} with {manifest.algorithm}, this program reads version {_VERSION} with "
            f"{_ALGORITHM}; {_suggest_restoring(folder)}"
        )
    return manifest


def find_damage(folder: Path, names: Collection[str] | None = None) -> str | None:
    """Describe the first file that differs from the manifest, in the order of names; None if all match.

    `names`: relative paths to check, by default all. Reads the files, several at once. Raises DamagedFile for an
    unusable manifest.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    checked = [name for name in manifest.files if names is None or name in names]
    with ThreadPoolExecutor(_count_threads(len(checked))) as threads:
        found = threads.map(
            _describe_damage, (folder / name for name in checked), map(manifest.files.get, checked), repeat(digest_file)
        )
        return next((text for text in found if text is not None), None)


def check_folder(folder: Path, names: Collection[str] | None = None) -> None:
    """Raise DamagedFile if a file differs from the folder's manifest."""
    if (damage := find_damage(folder, names)) is not None:
        raise DamagedFile(f"{damage}; {_suggest_restoring(folder)}")


def check_top_files(folder: Path) -> None:
    """Check a folder without its inner folders, such as the exported model of a checkpoint."""
    manifest = read_manifest(folder)
    check_folder(folder, [name for name in (manifest.files if manifest else ()) if "/" not in name])


def check_file(path: Path) -> None:
    """Check a file against the nearest manifest that lists it, before the file is read. A process digests it once.

    Raises DamagedFile. A file that no manifest lists is not checked.
    """
    path = path.absolute()
    for folder in path.parents[:_MAX_DEPTH]:
        manifest = _read_cached_manifest(folder)
        expected = manifest and manifest.files.get(path.relative_to(folder).as_posix())
        if not expected:
            continue
        if (damage := _describe_damage(path, expected, _digest_once)) is not None:
            raise DamagedFile(f"{damage}; {_suggest_restoring(folder)}")
        return


def _describe_damage(path: Path, expected: str | None, digest: Callable[[Path], str]) -> str | None:
    try:
        found = digest(path)
    except FileNotFoundError:
        return f"{path}: missing, but {MANIFEST_NAME} lists it"
    except OSError as error:
        return f"{path}: cannot be read: {os.strerror(error.errno or 0)}"
    return None if found == expected else f"{path}: damaged, or changed after it was finished"


def _digest_once(path: Path) -> str:
    """Return the digest; read the file again only if its state has changed."""
    state = path.stat()
    return _digest_unchanged(path, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=4096)
def _digest_unchanged(path: Path, _inode: int, _size: int, _mtime_ns: int) -> str:
    return digest_file(path)


def _read_cached_manifest(folder: Path) -> Manifest | None:
    try:
        state = (folder / MANIFEST_NAME).stat()
    except OSError:
        return None
    return _read_unchanged_manifest(folder, state.st_ino, state.st_size, state.st_mtime_ns)


@lru_cache(maxsize=256)
def _read_unchanged_manifest(folder: Path, _inode: int, _size: int, _mtime_ns: int) -> Manifest | None:
    return read_manifest(folder)


def _suggest_restoring(folder: Path) -> str:
    return f"restore it from a copy, or delete {folder / MANIFEST_NAME} to use the files as they are"


def _count_threads(num_files: int) -> int:
    return max(1, min(_MAX_THREADS, os.cpu_count() or 1, num_files))
