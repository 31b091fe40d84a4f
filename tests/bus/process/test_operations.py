"""Tests of the record of operations that a process writes and the launcher reads."""

from pathlib import Path

import pytest

from asterism.bus.process.operations import OperationRecord, describe_operations, load_operations, operations_path
from asterism.configs.run_folder import RunFolder


def list_names(path: Path, incarnation: int = 1) -> list[str]:
    return [each.name for each in load_operations(path, incarnation)]


def test_the_file_lists_running_operations_outermost_first(tmp_path: Path) -> None:
    path = tmp_path / "learner rank 1.operations"
    record = OperationRecord(600.0, path)
    assert list_names(path) == []
    with record.run("step 3", is_limited=False):
        with record.run("save"):
            assert load_operations(path, 1) == record.running
            assert [(each.name, each.limit_s) for each in record.running] == [("step 3", 0.0), ("save", 600.0)]
            text = describe_operations(record.running)
            assert text.startswith("in step 3 since ") and ", in save since " in text
        assert list_names(path) == ["step 3"]
    assert list_names(path) == []
    assert list(tmp_path.iterdir()) == [path]
    record.close()
    assert list(tmp_path.iterdir()) == []


def test_operations_of_an_earlier_incarnation_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "learner.operations"
    with OperationRecord(600.0, path, incarnation=2).run("save"):
        assert (list_names(path, 2), list_names(path, 3)) == (["save"], [])


def test_concurrent_operations_can_end_in_any_order() -> None:
    record = OperationRecord()
    saving, training = record.run("save"), record.run("step 4")
    saving.__enter__()
    training.__enter__()
    saving.__exit__(None, None, None)
    assert [each.name for each in record.running] == ["step 4"]
    training.__exit__(None, None, None)
    assert record.running == ()


def test_the_record_keeps_the_operations_that_raised_the_first_error() -> None:
    record = OperationRecord()
    with pytest.raises(ValueError, match="lr"), record.run("step 3"), record.run("optimizer update"):
        raise ValueError("lr")
    with pytest.raises(OSError, match="disk"), record.run("save"):
        raise OSError("disk")
    assert record.running == ()
    assert record.failed.startswith("in step 3 since ") and ", in optimizer update since " in record.failed


def test_a_missing_folder_does_not_stop_the_process(tmp_path: Path) -> None:
    path = operations_path(RunFolder(tmp_path / "run"), "learner")
    assert not path.parent.exists()
    record = OperationRecord(600.0, path)
    with record.run("save"):
        assert [each.name for each in record.running] == ["save"]
    assert list_names(path) == []
