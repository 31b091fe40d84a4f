import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.contract import EngineFailure
from engine.weight_transfer.shared_memory import HEADER_BYTES, WeightsPublisher, load_published
from tests.engine.closeness import assert_close


def parameters(value: float) -> dict[str, Tensor]:
    return {"b": torch.full((3, 2), value), "a": torch.arange(5.0) + value, "c": torch.tensor([value]).expand(1)}


def assert_holds(loaded: dict[str, Tensor], value: float) -> None:
    assert_close(loaded, parameters(value), rtol=0, atol=0)


def test_published_weights_are_loaded_in_place(tmp_path: Path) -> None:
    published = WeightsPublisher(tmp_path).publish(7, parameters(2.5))
    target = parameters(0.0)
    address = target["a"].data_ptr()
    load_published(published, target)
    assert_holds(target, 2.5)
    assert target["a"].data_ptr() == address
    assert (published.version, published.num_bytes) == (7, 4 * 12)


def test_parameters_of_a_bfloat16_model_are_cast(tmp_path: Path) -> None:
    published = WeightsPublisher(tmp_path).publish(0, {"a": torch.tensor([1.0, 1 / 3])})
    target = {"a": torch.zeros(2, dtype=torch.bfloat16)}
    load_published(published, target)
    assert target["a"].tolist() == [1.0, torch.tensor(1 / 3).bfloat16().item()]


def test_a_version_stays_readable_while_the_next_one_is_written(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    first, second = publisher.publish(1, parameters(1.0)), publisher.publish(2, parameters(2.0))
    for published, value in ((first, 1.0), (second, 2.0)):
        target = parameters(0.0)
        load_published(published, target)
        assert_holds(target, value)


def test_an_overwritten_version_is_refused_and_changes_nothing(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    old = publisher.publish(1, parameters(1.0))
    publisher.publish(3, parameters(3.0))
    target = parameters(0.0)
    with pytest.raises(EngineFailure, match="holds version 3, not 1"):
        load_published(old, target)
    assert_holds(target, 0.0)


def test_a_torn_write_is_refused_by_its_digest_and_changes_nothing(tmp_path: Path) -> None:
    published = WeightsPublisher(tmp_path).publish(1, parameters(1.0))
    with Path(published.path).open("r+b") as file:
        file.seek(HEADER_BYTES + 9)
        file.write(b"\x55")
    target = parameters(0.0)
    with pytest.raises(EngineFailure, match="overwritten or are damaged"):
        load_published(published, target)
    assert_holds(target, 0.0)


def test_a_partly_written_slot_is_refused(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    published = publisher.publish(1, parameters(1.0))

    class Killed(Exception):
        pass

    class Fatal(dict[str, Tensor]):
        def __getitem__(self, name: str) -> Tensor:
            if name == "b":
                raise Killed
            return super().__getitem__(name)

    with pytest.raises(Killed):
        publisher.publish(3, Fatal(parameters(3.0)))
    with pytest.raises(EngineFailure, match="holds version -1, not 1"):
        load_published(published, parameters(0.0))


def test_weights_of_another_model_are_refused(tmp_path: Path) -> None:
    published = WeightsPublisher(tmp_path).publish(1, parameters(1.0))
    with pytest.raises(EngineFailure, match="48 bytes, but the model needs 44"):
        load_published(published, {"a": torch.zeros(11)})


def test_a_missing_or_truncated_file_is_an_engine_failure(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    published = publisher.publish(1, parameters(1.0))
    os.truncate(published.path, HEADER_BYTES)
    with pytest.raises(EngineFailure, match="has 64 bytes"):
        load_published(published, parameters(0.0))
    publisher.close()
    with pytest.raises(EngineFailure, match="cannot be read: No such file"):
        load_published(published, parameters(0.0))


def test_closing_removes_the_files(tmp_path: Path) -> None:
    publisher = WeightsPublisher(tmp_path)
    for version in range(3):
        publisher.publish(version, parameters(1.0))
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_a_publisher_reuses_the_files_of_a_killed_publisher(tmp_path: Path) -> None:
    WeightsPublisher(tmp_path).publish(4, parameters(1.0))
    published = WeightsPublisher(tmp_path).publish(4, parameters(2.0))
    target = parameters(0.0)
    load_published(published, target)
    assert_holds(target, 2.0)
