"""The settings on a fork server's or grader's command line."""

import json
from typing import NamedTuple

MAX_CODE_BYTES = 1 << 20
MAX_STDIN_BYTES = 8 << 20
MAX_GRADE_WALL = 10.0  # a grading gets at most this many times its CPU time limit


class ServerSettings(NamedTuple):
    preload: str  # "bare", "numpy", "scientific", or "grader"
    namespaces: bool
    import_folders: tuple[str, ...]  # sys.path of executed code
    time_limit_s: float  # CPU time for a grader, clock time for a fork server
    memory_mib: int  # memory of a call, beyond the fork server's own address space
    max_processes: int
    file_mib: int
    output_bytes: int
    fork_servers: int = 1  # fork servers with the same preload, which share the CPUs
    warm_processes: int = 4  # processes that are forked and isolated ahead of the calls
    spare_notebooks: int = 0  # further processes, prepared as notebooks ahead of their first cells
    kernel_users: bool = False  # true if the executor offers users (asterism.sandbox.inside.isolation.kernel_users)
    call_cgroups: bool = False  # whether the executor then sends the descriptor of a cgroup folder
    concurrent_gradings: int = 4
    max_call_extension: float = 4.0  # clock time of a call on a busy machine, in multiples of the time limit

    def to_json(self) -> str:
        return json.dumps(self._asdict())


def parse_settings(text: str) -> ServerSettings:
    values = json.loads(text)
    values["import_folders"] = tuple(values["import_folders"])
    return ServerSettings(**values)
