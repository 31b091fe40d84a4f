import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asterism.bus.messages import WeightsPublished
from asterism.engine.contract import EngineFailure
from asterism.engine.weight_transfer.shared_memory import load_published, open_published
from asterism.engine.weight_transfer.slot_writer import SlotWriter
from asterism.engine.weight_transfer.weight_layout import get_layout
from tests.engine.closeness import assert_close
from tests.engine.whole_publisher import WholePublisher, damage


def parameters(value: float) -> dict[str, Tensor]:
    return {"b": torch.full((3, 2), value), "a": torch.arange(5.0) + value, "c": torch.tensor([value]).expand(1)}


def load(published: WeightsPublished) -> dict[str, Tensor]:
    target = parameters(0.0)
    load_published(published, target, torch.float32)
    return target


def assert_holds(loaded: dict[str, Tensor], value: float) -> None:
    assert_close(loaded, parameters(value), rtol=0, atol=0)


def assert_refused(published: WeightsPublished, message: str) -> None:
    """Check that a load is refused with this message and changes no tensor."""
    target = parameters(0.0)
    with pytest.raises(EngineFailure, match=message):
        load_published(published, target, torch.float32)
    assert_holds(target, 0.0)


def test_published_weights_are_loaded_in_place(tmp_path: Path) -> None:
    published = WholePublisher(tmp_path).publish(7, parameters(2.5))
    target = parameters(0.0)
    address = target["a"].data_ptr()
    load_published(published, target, torch.float32)
    assert_holds(target, 2.5)
    assert target["a"].data_ptr() == address
    assert (published.version, published.num_bytes) == (7, 3 * 64)


def test_weights_are_published_in_the_dtype_of_the_engines(tmp_path: Path) -> None:
    published = WholePublisher(tmp_path, torch.bfloat16).publish(0, {"a": torch.tensor([1.0, 1 / 3])})
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    load_published(published, target, torch.bfloat16)
    assert target["a"].tolist() == [1.0, torch.tensor(1 / 3).bfloat16().item()]


def test_a_version_stays_readable_while_the_next_version_is_written(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    first, second = publisher.publish(1, parameters(1.0)), publisher.publish(2, parameters(2.0))
    for published, value in ((first, 1.0), (second, 2.0)):
        assert_holds(load(published), value)


def test_an_overwritten_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    old = publisher.publish(1, parameters(1.0))
    publisher.publish(3, parameters(3.0))
    assert_refused(old, "holds version 3, not 1")


def test_a_torn_write_is_detected_by_its_digest_and_changes_nothing(tmp_path: Path) -> None:
    published = WholePublisher(tmp_path).publish(1, parameters(1.0))
    damage(published)
    assert_refused(published, "chunk 0 of the weights of version 1 is damaged")


def test_a_partly_written_slot_is_refused(tmp_path: Path) -> None:
    published = WholePublisher(tmp_path).publish(1, parameters(1.0))
    writer = SlotWriter(tmp_path, get_layout(parameters(0.0), torch.float32), 2)
    writer.prepare(3)
    assert_refused(published, "is being overwritten")
    writer.open(3)["a"].fill_(3.0)
    del writer  # the kernel releases the lock, as after a kill of the process
    assert_refused(published, "holds version -1, not 1")


def test_a_slot_keeps_its_weights_while_an_engine_reads_it(tmp_path: Path) -> None:
    publisher, layout = WholePublisher(tmp_path), get_layout(parameters(0.0), torch.float32)
    first = publisher.publish(1, parameters(1.0))
    with open_published(first, layout) as views:
        third = publisher.publish(3, parameters(3.0))
        assert third.path == first.path
        assert_holds(views, 1.0)
        with open_published(third, layout) as newer:
            assert_holds(newer, 3.0)


def test_an_unread_slot_is_overwritten_in_place(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    first = publisher.publish(1, parameters(1.0))
    file = Path(first.path).stat().st_ino
    load(first)
    assert Path(publisher.publish(3, parameters(3.0)).path).stat().st_ino == file


def test_the_digest_depends_only_on_the_weights(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    digests = [publisher.publish(number, parameters(value)).digest for number, value in enumerate((1.0, 2.0, 1.0))]
    assert digests[0] == digests[2] != digests[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_matrices_are_loaded_into_transposed_parameters(tmp_path: Path, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = {"w": torch.randn(700, 33, generator=generator), "v": torch.randn(3, 5, generator=generator)}
    published = WholePublisher(tmp_path, dtype).publish(1, weights)
    fused = torch.zeros(33, 1000, dtype=dtype)
    target = {"w": fused[:, 100:800].t(), "v": torch.zeros(5, 3, dtype=dtype).t()}
    load_published(published, target, dtype)
    assert all(torch.equal(target[name], each.to(dtype)) for name, each in weights.items())
    assert not fused[:, :100].any()
    assert not fused[:, 800:].any()


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    published = WholePublisher(tmp_path).publish(1, parameters(1.0))
    with pytest.raises(EngineFailure, match="192 bytes, but the model needs 64"):
        load_published(published, {"a": torch.zeros(11)}, torch.float32)


def test_a_missing_or_truncated_file_is_an_engine_failure(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    published = publisher.publish(1, parameters(1.0))
    for size in (64, 0):
        os.truncate(published.path, size)
        assert_refused(published, f"has {size} bytes")
    publisher.close()
    assert_refused(published, "cannot be read: No such file")


def test_closing_removes_the_files(tmp_path: Path) -> None:
    publisher = WholePublisher(tmp_path)
    for version in range(3):
        publisher.publish(version, parameters(1.0))
    publisher.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("size", [None, 0, 64])
def test_a_publisher_reuses_or_replaces_the_file_of_a_killed_publisher(tmp_path: Path, size: int | None) -> None:
    """`size`: bytes of the unfinished file."""
    published = WholePublisher(tmp_path).publish(4, parameters(1.0))
    if size is not None:
        os.truncate(published.path, size)
    assert_holds(load(WholePublisher(tmp_path).publish(4, parameters(2.0))), 2.0)
