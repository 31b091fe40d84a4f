"""Delivery to one sink keeps the order of records despite kills, outages, and steps that a resumed run repeats."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from asterism.actors.metrics_file import MetricsFile
from asterism.actors.sinks.delivery import MAX_BATCH, MetricLines, count_undelivered, deliver, get_ledger_path
from asterism.actors.sinks.delivery_ledger import DeliveryLedger
from asterism.actors.sinks.metric_records import MetricRecord
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from tests.actors.sinks.backends import write_lines
from tests.actors.sinks.file_sink import FileSink
from tests.bus.process.test_structured_log import limiting_file_size

Line = dict[str, object]


def step(number: int, reward: float = 0.5) -> Line:
    return {"kind": "step", "step": number, "reward": reward}


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path)


def deliver_all(folder: RunFolder, sink: FileSink | None = None) -> list[str]:
    """Deliver all lines, and return the lines of the sink's file."""
    output = folder.path / "out"
    used = sink or FileSink(output)
    deliver(folder, "wandb", lambda: used, lambda: True)
    return output.read_text().split("\n")[:-1]


class UnreliableSink(FileSink):
    """A sink that raises before the record with the number `fails_at`."""

    def __init__(self, path: Path, fails_at: int, is_durable: bool = True) -> None:
        super().__init__(path)
        self.is_durable = is_durable
        self._fails_at = fails_at

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            if record.number == self._fails_at:
                raise ConnectionError("down")
            super().write([record])


def test_each_record_is_delivered_once_over_several_processes(folder: RunFolder) -> None:
    write_lines(folder, step(1), step(2))
    assert deliver_all(folder) == ["0", "1", "closed"]
    write_lines(folder, step(1), step(2), step(3))
    assert deliver_all(folder) == ["0", "1", "closed", "2", "closed"]
    assert count_undelivered(folder, "wandb") == (0, 3)


def test_lines_written_during_the_delivery_are_delivered_in_order(folder: RunFolder) -> None:
    written = [step(1)]
    write_lines(folder, *written)

    def wait() -> bool:
        written.append(step(len(written) + 1))
        write_lines(folder, *written)
        return len(written) == 3

    deliver(folder, "wandb", lambda: FileSink(folder.path / "out"), wait)
    assert (folder.path / "out").read_text().split() == ["0", "1", "2", "closed"]


def test_an_incomplete_line_waits_for_its_end(folder: RunFolder) -> None:
    lines = MetricLines(folder.metrics)
    assert lines.read_new() == []
    folder.metrics.write_bytes(b'{"kind"')
    assert lines.read_new() == []
    folder.metrics.write_bytes(b'{"kind":1,"step":1}\n{"ki')
    assert lines.read_new() == [b'{"kind":1,"step":1}']
    MetricsFile(folder.metrics)  # a restarted head removes the incomplete line
    assert lines.read_new() == []
    folder.metrics.write_bytes(b'{"kind":1,"step":1}\n{"kind":2}\n')
    assert lines.read_new() == [b'{"kind":2}']


def test_records_that_a_failing_sink_has_not_accepted_are_delivered_later(folder: RunFolder) -> None:
    total = 2 * MAX_BATCH + 1
    write_lines(folder, *(step(number) for number in range(total)))
    with pytest.raises(ConnectionError):
        deliver_all(folder, UnreliableSink(folder.path / "out", fails_at=MAX_BATCH + 5))
    assert count_undelivered(folder, "wandb") == (total - MAX_BATCH, total)
    numbers = [int(line) for line in deliver_all(folder) if line.isdigit()]
    assert numbers == [*range(MAX_BATCH + 5), *range(MAX_BATCH, total)]


def test_a_sink_that_confirms_only_at_its_close_gets_unconfirmed_records_again(folder: RunFolder) -> None:
    write_lines(folder, step(1))
    deliver_all(folder, UnreliableSink(folder.path / "out", fails_at=99, is_durable=False))
    write_lines(folder, step(1), step(2), step(3), step(4))
    with pytest.raises(ConnectionError):
        deliver_all(folder, UnreliableSink(folder.path / "out", fails_at=3, is_durable=False))
    assert count_undelivered(folder, "wandb") == (3, 4)
    assert deliver_all(folder)[4:] == ["1", "2", "3", "closed"]


@pytest.mark.parametrize("kept_bytes", [-1, -20])
def test_the_record_of_an_incomplete_ledger_entry_is_repeated(folder: RunFolder, kept_bytes: int) -> None:
    write_lines(folder, step(1), step(2))
    deliver_all(folder)
    ledger = get_ledger_path(folder, "wandb")
    ledger.write_bytes(ledger.read_bytes()[:kept_bytes])
    assert count_undelivered(folder, "wandb") == (2, 2)
    assert deliver_all(folder)[3:] == ["0", "1", "closed"]
    assert count_undelivered(folder, "wandb") == (0, 2)


def test_a_full_disk_is_an_error_and_the_next_delivery_repeats_the_record(folder: RunFolder) -> None:
    write_lines(folder, step(1), step(2))
    # The first ledger entry has 53 bytes.
    with limiting_file_size(70), pytest.raises(OSError, match=r"No space left on device: .*wandb\.jsonl"):
        deliver_all(folder)
    assert deliver_all(folder) == ["0", "1", "closed"]


def test_a_damaged_ledger_is_refused_with_the_remedy(folder: RunFolder) -> None:
    folder.sinks.mkdir()
    get_ledger_path(folder, "wandb").write_text('["sent","st["sent","step",1,"2b"]\n')
    with pytest.raises(UnusableInput, match=r"wandb\.jsonl: damaged .*; delete it to send all records again"):
        deliver_all(folder)


def raise_connection_error(*_: object) -> None:
    raise ConnectionError


def test_a_resumed_run_replaces_the_records_of_the_steps_that_it_repeats(folder: RunFolder) -> None:
    health: Line = {"kind": "health", "step": 3, "check": "entropy", "action": "warn", "message": "low"}
    late: Line = {"kind": "evaluation", "step": 1, "label": "step_greedy", "accuracy": 0.5}
    cold_start: Line = {"kind": "sft", "step": 7, "loss": 1.0}
    write_lines(folder, cold_start, step(1), step(2), late, step(3), health)
    deliver_all(folder)
    MetricsFile(folder.metrics).truncate_after(1)
    kept = folder.metrics.read_bytes()
    assert kept.count(b"\n") == 3
    write_lines(folder, cold_start, step(1), late, step(2, 0.6), step(3, 0.7), health)
    assert folder.metrics.read_bytes().startswith(kept)
    with pytest.raises(ConnectionError), pytest.MonkeyPatch.context() as patch:
        patch.setattr(FileSink, "replace_from", raise_connection_error)
        deliver_all(folder)
    # The health report is sent again although it is unchanged, because TensorBoard drops it with step 3.
    assert deliver_all(folder)[7:] == ["from 2", "6", "7", "8", "closed"]
    assert deliver_all(folder)[12:] == ["closed"]


def test_a_second_process_cannot_deliver_to_the_same_sink(folder: RunFolder) -> None:
    write_lines(folder, step(1))
    with DeliveryLedger(get_ledger_path(folder, "wandb")), pytest.raises(UnusableInput, match=r"wandb\.jsonl: another"):
        deliver_all(folder)
    assert deliver_all(folder) == ["0", "closed"]


def test_a_file_without_records_can_be_delivered(folder: RunFolder) -> None:
    assert deliver_all(folder) == ["closed"]
    assert count_undelivered(folder, "wandb") == (0, 0)
