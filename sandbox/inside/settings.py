"""What a fork server is told on its command line. Standard library only."""

import json
from typing import NamedTuple

CODE_BYTES = 1 << 20  # a longer code text is refused
STDIN_BYTES = 8 << 20  # a longer standard input is refused


class Settings(NamedTuple):
    flavour: str  # "bare", "numpy", "scientific", or "grader"
    namespaces: bool
    import_folders: tuple[str, ...]  # where executed code finds its modules, in this order
    time_limit_s: float
    memory_mib: int  # beyond what the fork server itself has mapped
    max_processes: int
    file_mib: int
    output_bytes: int
    fork_servers: int = 1  # of this flavour, which share the processors
    warm_processes: int = 4  # forked and isolated ahead of the calls

    def to_json(self) -> str:
        return json.dumps(self._asdict())


def from_json(text: str) -> Settings:
    values = json.loads(text)
    values["import_folders"] = tuple(values["import_folders"])
    return Settings(**values)
