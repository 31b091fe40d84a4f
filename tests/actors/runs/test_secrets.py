"""Secrets that are planted in a whole run are in no command line, and in no file that others can read.

The run ends with the first error of its reward function, which fails for every trajectory.
"""

import json
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import ASTERISM, PATIENCE_S, start_command
from tests.actors.runs.test_task_faults import CONFIG

pytestmark = pytest.mark.slow

LITERAL, REFERRED = "planted-literal-4711", "planted-referred-4712"
CODE = """
class User:
    def __init__(self, token, key):
        self.token, self.key = token, key

    def init(self, row):
        if row["kind"] == "raise":
            raise ConnectionError(f"401 for http://service/?key={self.key}")
        return "Good day."

    def step(self, message):
        return {"messages": "And?", "rewards": {"turns": 0.5}}

def score(completions, **columns):
    raise ConnectionError(f"401 for http://service/?key={__import__('os').environ['SERVICE_KEY']}")
"""
TASK = f"""
[[tasks]]
name = "talk"
import = "code.py:User"
data = "talk.jsonl"
parameters = {{ token = "{LITERAL}", key = "${{SERVICE}}" }}
variables = {{ SERVICE_KEY = "${{SERVICE}}", TOKEN = "{LITERAL}" }}
[tasks.reward.functions]
f = "code.py:score"
"""


def write_run(folder: Path) -> Path:
    (folder / "code.py").write_text(CODE)
    rows = [{"question": f"{number}? ", "kind": kind} for number, kind in enumerate(("fine", "raise", "fine", "fine"))]
    (folder / "talk.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = folder / "run.toml"
    path.touch(0o600)
    path.write_text(CONFIG.format(prompts=4) + TASK)
    return path


def list_command_lines() -> Iterator[bytes]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:  # the process has ended
            continue


def find_in_files(folder: Path, *secrets: str, readable_by: int) -> set[Path]:
    """Return the files that contain a secret and have one of the permissions `readable_by`."""
    found = set[Path]()
    for path in (Path(parent, name) for parent, _, names in os.walk(folder) for name in names):
        try:
            status = path.stat()
            if stat.S_ISREG(status.st_mode) and status.st_mode & readable_by:
                content = path.read_bytes()
                found.update({path} if any(secret.encode() in content for secret in secrets) else ())
        except OSError:  # the file was removed meanwhile
            continue
    return found


def test_secrets_are_in_no_command_line_and_in_no_file_that_others_can_read(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    folder = tmp_path_factory.mktemp("s")  # a short path, because the folder has sockets
    config, others = write_run(folder), stat.S_IRGRP | stat.S_IROTH
    environment = {**os.environ, "SERVICE": REFERRED, "TMPDIR": str(folder)}
    command = [*ASTERISM, "run", str(config), "--set", f"runs_folder={folder}"]
    exposed, num_looks = set[bytes | Path](), 0
    with start_command(command, environment=environment) as process:
        deadline = time.monotonic() + PATIENCE_S
        while process.poll() is None:
            assert time.monotonic() < deadline
            exposed |= {line for line in list_command_lines() if LITERAL.encode() in line or REFERRED.encode() in line}
            exposed |= find_in_files(folder, LITERAL, REFERRED, readable_by=others)
            num_looks += 1
            time.sleep(0.2)  # wait for other processes
        output = process.communicate()[0]
    assert num_looks > 5
    assert process.returncode == 1, "a run without any reward must fail"
    assert "reward: f raised ConnectionError: 401 for http://service/?key=${SERVICE}" in " ".join(output.split())
    assert exposed == set()
    run = RunFolder(folder / "demo")
    assert not run.summary.exists()
    assert find_in_files(run.path, REFERRED, readable_by=0o777) == set()
    assert find_in_files(run.path, LITERAL, readable_by=0o777) == {run.config}
    assert 'key = "${SERVICE}"' in run.config.read_text()
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600
    assert REFERRED not in output
    assert LITERAL not in output
