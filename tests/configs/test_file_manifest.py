"""Manifests find every change of a listed file, and the message names the file."""

import random
from pathlib import Path

import pytest

from asterism.configs.file_manifest import (
    MANIFEST_NAME,
    DamagedFile,
    check_file,
    check_folder,
    digest_file,
    find_damage,
    list_files,
    read_manifest,
    write_manifest,
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "sub" / "deep").mkdir(parents=True)
    for number, name in enumerate(("a.json", "sub/b.bin", "sub/deep/c.bin")):
        (tmp_path / name).write_bytes(bytes([number]) * 1000)
    write_manifest(tmp_path, list_files(tmp_path))
    return tmp_path


def flip(path: Path, position: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1 << bit
    path.write_bytes(content)


def test_an_unchanged_folder_has_no_damage(folder: Path) -> None:
    assert find_damage(folder) is None
    for file in list_files(folder):
        check_file(file)


@pytest.mark.parametrize("name", ["a.json", "sub/b.bin", "sub/deep/c.bin"])
def test_each_changed_short_or_missing_file_is_named(folder: Path, name: str) -> None:
    path = folder / name
    original = path.read_bytes()
    for position in random.Random(name).sample(range(len(original)), 8):
        flip(path, position)
        with pytest.raises(DamagedFile, match=rf"{path}: damaged.* or delete {folder / MANIFEST_NAME}"):
            check_folder(folder)
        path.write_bytes(original)
    path.write_bytes(original[:-1])
    with pytest.raises(DamagedFile, match=rf"{path}: damaged"):
        check_file(path)
    path.unlink()
    with pytest.raises(DamagedFile, match=rf"{path}: missing"):
        check_folder(folder)


def test_only_the_chosen_names_are_read(folder: Path) -> None:
    flip(folder / "a.json", 0)
    assert find_damage(folder, ["sub/b.bin"]) is None
    check_file(folder / "sub" / "b.bin")


@pytest.mark.slow
def test_a_flipped_bit_in_the_manifest_is_reported_or_has_no_effect(folder: Path) -> None:
    """If a flip changes a file's name in the manifest, the file is reported as missing."""
    path = folder / MANIFEST_NAME
    original, manifest = path.read_bytes(), read_manifest(folder)
    chosen = random.Random(0)
    for position in range(len(original)):
        path.write_bytes(original)
        flip(path, position, chosen.randrange(7))
        try:
            unchanged = read_manifest(folder) == manifest
            assert unchanged or find_damage(folder) is not None
        except DamagedFile as error:
            assert str(path) in str(error)


def test_a_file_without_a_manifest_is_not_checked(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    check_file(tmp_path / "a")
    assert find_damage(tmp_path) is None


def test_a_manifest_of_another_version_is_refused_with_a_remedy(folder: Path) -> None:
    path = folder / MANIFEST_NAME
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    with pytest.raises(DamagedFile, match=r"version 2 .* this program reads version 1"):
        check_file(folder / "a.json")


def test_known_digests_are_not_computed_again(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    write_manifest(tmp_path, [tmp_path / "a"], known={"a": digest_file(tmp_path / "a"), "b": "0"})
    manifest = read_manifest(tmp_path)
    assert manifest is not None
    assert manifest.files == {"a": digest_file(tmp_path / "a"), "b": "0"}
