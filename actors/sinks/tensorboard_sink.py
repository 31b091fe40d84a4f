"""This sink writes event files for TensorBoard into RUN/tensorboard, a folder per axis: `tensorboard --logdir runs`.

Each axis has a folder, because an event that drops replaced steps applies to all names of a folder.
"""

# pyright: reportAttributeAccessIssue=false
# Modules that protobuf generates get their classes at run time.

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.plugins.text.metadata import create_summary_metadata
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from asterism.actors.sinks.contract import BackendRun
from asterism.actors.sinks.metric_records import Axis, MetricRecord

CONFIG_TAG = "config"


class TensorboardSink:
    is_durable = True

    def __init__(self, folder: Path, settings: str) -> None:
        self._folder = folder
        self._settings = settings
        self._writers: dict[Axis, EventFileWriter] = {}

    def write(self, records: Sequence[MetricRecord]) -> None:
        for record in records:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in record.values.items()]
            event = Event(wall_time=time.time(), step=record.step, summary=Summary(value=values))
            self._get_writer(record.axis).add_event(event)
            self._write_texts(record.axis, record.step, record.texts)
        for writer in self._writers.values():
            writer.flush()

    def replace_from(self, step: int) -> None:
        """Let TensorBoard drop the events from this step on, in all earlier files."""
        log = SessionLog(status=SessionLog.START)
        self._get_writer("rl").add_event(Event(wall_time=time.time(), step=step, session_log=log))

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()

    def _get_writer(self, axis: Axis) -> EventFileWriter:
        if axis not in self._writers:
            earlier = [int(path.name.split(".")[3]) for path in (self._folder / axis).glob("events.out.tfevents.*")]
            while int(time.time()) in earlier:  # TensorBoard reads files in the order of the seconds in their names
                time.sleep(0.05)
            self._writers[axis] = EventFileWriter(str(self._folder / axis))
            if not earlier:
                self._write_texts(axis, 0, {CONFIG_TAG: self._settings})
        return self._writers[axis]

    def _write_texts(self, axis: Axis, step: int, texts: Mapping[str, str]) -> None:
        for name, text in texts.items():
            tensor = TensorProto(dtype=DT_STRING, string_val=[text.encode()])
            metadata = create_summary_metadata(display_name=name, description="")
            value = Summary.Value(tag=name, tensor=tensor, metadata=metadata)
            event = Event(wall_time=time.time(), step=step, summary=Summary(value=[value]))
            self._get_writer(axis).add_event(event)


def open_run(run: BackendRun) -> TensorboardSink:
    """Open the writer. The settings become a text with a line per key."""
    lines = (f"{key} = {value}".replace("\n", "\\n") for key, value in run.flatten_settings().items())
    settings = "".join(f"    {line}\n" for line in lines)
    return TensorboardSink(run.folder.path / "tensorboard", settings)
