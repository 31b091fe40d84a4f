"""Read the local stores of TensorBoard, W&B, MLflow and Trackio, if possible with the readers of the packages."""

import json
import sqlite3
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from asterism.actors.sinks.metric_records import build_record
from asterism.configs.run_folder import RunFolder

BLOCK_BYTES, FILE_HEADER_BYTES, HEADER_BYTES = 32_768, 7, 7  # W&B's files have the format of LevelDB's logs
FULL, FIRST, LAST = 1, 2, 4


class Stored(NamedTuple):
    """The values of a run in a backend, by name and step, in the order in which they were written."""

    runs: set[str]  # ids of the runs of the project
    values: dict[tuple[str, int], list[float]]
    settings: dict[str, str]  # some of the run's settings


def expected_values(folder: RunFolder) -> dict[tuple[str, int], float]:
    """Return the values of metrics.jsonl, by name and step."""
    records = [build_record(number, line) for number, line in enumerate(folder.metrics.read_bytes().splitlines())]
    return {(name, record.step): value for record in records for name, value in record.values.items()}


def read_backend(name: str, folder: RunFolder) -> Stored:
    return {"tensorboard": _tensorboard, "wandb": _wandb, "mlflow": _mlflow, "trackio": _trackio}[name](folder)


def _tensorboard(folder: RunFolder) -> Stored:
    from tensorboard.backend.event_processing.event_accumulator import SCALARS, TENSORS, EventAccumulator

    values: dict[tuple[str, int], list[float]] = {}
    settings: dict[str, str] = {}
    for axis in ("cold_start", "rl"):
        events = EventAccumulator(str(folder.path / "tensorboard" / axis), {SCALARS: 0, TENSORS: 0}).Reload()
        for tag in events.Tags()["scalars"]:
            for event in events.Scalars(tag):
                values.setdefault((tag, event.step), []).append(event.value)
        text = events.Tensors("config")[0].tensor_proto.string_val[0].decode()
        settings |= {key: value for key, _, value in (line.strip().partition(" = ") for line in text.splitlines())}
    return Stored({"tensorboard"}, values, settings)


def _wandb(folder: RunFolder) -> Stored:
    from wandb.proto.wandb_internal_pb2 import Record

    runs, values, settings = set[str](), dict[tuple[str, int], list[float]](), dict[str, str]()
    for path in sorted(folder.path.glob("wandb/offline-run-*/*.wandb")):
        for content in _read_blocks(path.read_bytes()):
            record = Record.FromString(content)
            if record.HasField("run"):
                runs.add(record.run.run_id)
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                settings |= _flatten(config)
            if record.HasField("history"):
                fields = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = fields.get("rl/step", fields.get("cold_start/step"))
                for name, value in fields.items():
                    if not name.startswith("_") and not name.endswith("/step") and not isinstance(value, str):
                        values.setdefault((name, step), []).append(value)
    return Stored(runs, values, settings)


def _read_blocks(content: bytes) -> Iterator[bytes]:
    position, part = FILE_HEADER_BYTES, b""
    while position + HEADER_BYTES <= len(content):
        left = BLOCK_BYTES - position % BLOCK_BYTES
        if left < HEADER_BYTES:
            position += left
            continue
        length = int.from_bytes(content[position + 4 : position + 6], "little")
        kind, position = content[position + 6], position + HEADER_BYTES
        part += content[position : position + length]
        position += length
        if kind in (FULL, LAST):
            yield part
            part = b""


def _mlflow(folder: RunFolder) -> Stored:
    """Read the store by SQL, because the package takes seconds to import."""
    with sqlite3.connect(folder.path / "mlflow.db") as database:
        rows = database.execute("SELECT key, step, value FROM metrics ORDER BY timestamp").fetchall()
        tags = database.execute("SELECT value FROM tags WHERE key = 'asterism.run_id'").fetchall()
        settings = dict(database.execute("SELECT key, value FROM params").fetchall())
        runs = {f"{status} {name}" for status, name in database.execute("SELECT status, name FROM runs")}
    assert runs == {"FINISHED demo"}
    values: dict[tuple[str, int], list[float]] = {}
    for name, step, value in rows:
        values.setdefault((name, step), []).append(value)
    return Stored({tag for (tag,) in tags}, values, settings)


def _trackio(folder: RunFolder) -> Stored:
    with sqlite3.connect(folder.path / "trackio" / "asterism.db") as database:
        rows = database.execute("SELECT run_id, step, metrics FROM metrics ORDER BY timestamp, id").fetchall()
        configs = database.execute("SELECT config FROM configs").fetchall()
    values: dict[tuple[str, int], list[float]] = {}
    for _, step, fields in rows:
        for name, value in json.loads(fields).items():
            if not isinstance(value, str):
                values.setdefault((name, step), []).append(value)
    return Stored({run for run, _, _ in rows}, values, _flatten(json.loads(configs[-1][0])))


def _flatten(config: dict[str, object]) -> dict[str, str]:
    """Flatten tables of one level: {table: {key: value}} becomes {"table.key": value}."""
    tables = {key: value for key, value in config.items() if isinstance(value, dict)}
    return {f"{table}.{key}": str(value) for table, values in tables.items() for key, value in values.items()}


def write_lines(folder: RunFolder, *lines: dict[str, object]) -> None:
    folder.metrics.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))
