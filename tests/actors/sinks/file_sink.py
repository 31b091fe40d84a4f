"""`python -m tests.actors.sinks.file_sink NAME FOLDER BEHAVIOUR [--follow]` runs a sink that writes a file.

It appends the number of each record to FOLDER/NAME.out. BEHAVIOUR: "works"; "hangs" or "fails" in the first write; or
"ends" without delivery.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from asterism.actors.sinks.delivery import deliver, make_wait_until_terminated
from asterism.actors.sinks.metric_records import MetricRecord
from asterism.configs.run_folder import RunFolder


class FileSink:
    is_durable = True

    def __init__(self, path: Path, behaviour: str = "works") -> None:
        self._path = path
        self._behaviour = behaviour

    def write(self, records: Sequence[MetricRecord]) -> None:
        if self._behaviour == "hangs":
            self._append("hangs")
            time.sleep(600)
        if self._behaviour == "fails":
            raise ConnectionError("the backend is down")
        for record in records:
            self._append(str(record.number))

    def replace_from(self, step: int) -> None:
        self._append(f"from {step}")

    def close(self) -> None:
        self._append("closed")

    def _append(self, text: str) -> None:
        with self._path.open("a") as file:
            file.write(f"{text}\n")


if __name__ == "__main__":
    _, name, path, behaviour, *follow = sys.argv
    folder = RunFolder(Path(path))
    sink = FileSink(folder.path / f"{name}.out", behaviour)
    if behaviour != "ends":
        deliver(folder, name, lambda: sink, make_wait_until_terminated() if follow else lambda: True)
