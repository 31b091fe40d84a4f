"""Tests: a checkpoint's metadata of tensors cannot refer to other classes or other folders."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, BytesStorageMetadata, Metadata

from asterism.engine.hf.weight_files import CheckpointError
from asterism.engine.learner.checkpoints.tensor_reader import TensorReader
from asterism.engine.learner.checkpoints.training_state import read_whole_weights, write_training_state
from asterism.engine.learner.distributed import RankGroup

SHAPES = {"weight": (4, 2)}


@pytest.fixture
def tensors(tmp_path: Path) -> Path:
    folder = tmp_path / "tensors"
    folder.mkdir()
    state = {"model": {"weight": torch.arange(8.0).reshape(4, 2)}, "random": {"cpu_0": torch.get_rng_state()}}
    write_training_state(folder, state, RankGroup(), lambda: None)
    return folder


class Payload:
    """An object whose unpickling calls a function."""

    def __init__(self, call: Callable[..., object], *arguments: object) -> None:
        self._call = call, arguments

    def __reduce__(self) -> Any:
        return self._call


def read_metadata(tensors: Path) -> Metadata:
    return pickle.loads((tensors / ".metadata").read_bytes())


def replace_metadata(tensors: Path, content: object) -> None:
    (tensors / ".metadata").write_bytes(pickle.dumps(content))


def assert_refused(tensors: Path, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_whole_weights(tensors, SHAPES)


def test_the_metadata_of_a_real_checkpoint_is_read(tensors: Path) -> None:
    assert torch.equal(read_whole_weights(tensors, SHAPES)["weight"], torch.arange(8.0).reshape(4, 2))
    found = TensorReader(tensors).read_metadata()
    assert found.state_dict_metadata == read_metadata(tensors).state_dict_metadata


@pytest.mark.parametrize(("call", "name"), [(os.mkdir, "mkdir"), (eval, "eval"), (torch.load, "load")])
def test_another_function_in_the_metadata_is_refused_and_not_called(
    tensors: Path, tmp_path: Path, call: Callable[..., object], name: str
) -> None:
    mark = tmp_path / "mark"
    replace_metadata(tensors, Payload(call, str(mark)))
    assert_refused(tensors, rf"tensors/\.metadata.*{name} is no class of tensor metadata")
    assert not mark.exists()


def test_a_call_within_valid_metadata_is_refused(tensors: Path, tmp_path: Path) -> None:
    metadata = read_metadata(tensors)
    metadata.planner_data = Payload(os.mkdir, str(tmp_path / "mark"))
    replace_metadata(tensors, metadata)
    assert_refused(tensors, r"posix\.mkdir is no class of tensor metadata")
    assert not (tmp_path / "mark").exists()


def test_enum_members_in_the_pickle_format_of_python_3_11_2_are_read(tensors: Path) -> None:
    metadata, member = read_metadata(tensors), _MEM_FORMAT_ENCODING.TORCH_CHANNELS_LAST
    metadata.planner_data = Payload(getattr, _MEM_FORMAT_ENCODING, member.name)
    replace_metadata(tensors, metadata)
    assert TensorReader(tensors).read_metadata().planner_data is member


@pytest.mark.parametrize("kind", ["a text", torch.Size])
def test_an_attribute_of_another_object_is_refused(tensors: Path, kind: object) -> None:
    replace_metadata(tensors, Payload(getattr, kind, "count"))
    assert_refused(tensors, r"count of .* is no member of an enum")


def test_pickled_objects_instead_of_tensors_are_refused(tensors: Path) -> None:
    """DCP would read such objects with torch.load(weights_only=False)."""
    metadata = read_metadata(tensors)
    metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
    replace_metadata(tensors, metadata)
    assert_refused(tensors, "BytesStorageMetadata is no class of tensor metadata")


def test_a_file_outside_the_folder_is_refused(tensors: Path) -> None:
    metadata = read_metadata(tensors)
    for place in metadata.storage_data.values():
        place.relative_path = "../other/__0_0.distcp"
    replace_metadata(tensors, metadata)
    assert_refused(tensors, r"is in \.\./other/__0_0\.distcp, outside of the folder")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"a": 1}), pickle.dumps(None)])
def test_the_error_for_invalid_metadata_names_the_file(tensors: Path, content: bytes) -> None:
    (tensors / ".metadata").write_bytes(content)
    assert_refused(tensors, r"tensors/\.metadata")
