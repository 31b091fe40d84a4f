"""Arguments, messages and tracebacks of a host process do not contain its secret settings."""

from pathlib import Path

import pytest

from asterism.bus.messages import EnvironmentRaised
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.tasks import DEFAULT_TASK
from asterism.tasks.hosting.task_services import build_host_command
from tests.processes import family
from tests.tasks.hosting.hosts import fail, open_host

SECRET = "planted-secret-4711"
SOURCE = '''
class World:
    def __init__(self, token, number=0):
        self.token = token

    def reset(self, how="", **row):
        if how == "raise":
            raise ConnectionError(f"401 for http://service/?key={self.token}")
        return "ready"

    def look(self) -> str:
        """Look."""
        raise ConnectionError(f"401 for http://service/?key={self.token}")

    def tell(self) -> str:
        """Tell."""
        return f"{self.token} {sys.argv[1:]} {sys.stdin.read()!r}"

    def get_reward(self):
        raise ConnectionError(f"401 for http://service/?key={self.token}")
'''


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # the process has ended
        return b""


@pytest.mark.slow
@pytest.mark.real_clock
async def test_errors_show_references_instead_of_values_and_no_command_line_contains_a_setting(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    parameters, secrets = {"token": SECRET}, {SECRET: "${TOKEN}"}
    async with open_host(tmp_path, SOURCE, "World", parameters=parameters, secrets=secrets) as host:
        failure = await fail(host.open(1, how="raise"))
        assert failure == "reset raised ConnectionError: 401 for http://service/?key=${TOKEN}"
        await host.open()
        assert await host.read("tell") == f"{SECRET} [] ''"
        assert host.pool.pids
        for pid in family(*host.pool.pids):
            assert SECRET.encode() not in command_line(pid)
        assert await host.call("look") == EnvironmentRaised("ConnectionError: 401 for http://service/?key=${TOKEN}")
        assert "get_reward raised ConnectionError: 401 for http://service/?key=${TOKEN}" in await fail(host.score())
    shown = capfd.readouterr().err
    assert "in get_reward" in shown
    assert SECRET not in shown


def build_task(parameters: dict[str, str], variables: dict[str, str]) -> TaskConfig:
    task = TaskConfig(
        name="t", import_path="task.py:World", data="rows.jsonl", parameters=parameters, variables=variables
    )
    return RunConfig(name="r", tasks=(task,)).resolved_tasks[0]


def test_only_commands_contain_the_values_of_references(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOKEN", SECRET)
    task = build_task({"token": "${TOKEN}"}, {"SERVICE_KEY": "${TOKEN}"})
    command = build_host_command(task, DEFAULT_TASK, "")
    assert command.settings.parameters == {"token": SECRET}
    assert command.variables == {"SERVICE_KEY": SECRET}
    assert command.settings.secrets == {SECRET: "${TOKEN}"}
    assert SECRET not in str(command.build_arguments())
    assert SECRET not in str(task)


@pytest.mark.parametrize("table", ["parameters", "variables"])
def test_a_missing_variable_is_named_with_its_key(table: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TOKEN", raising=False)
    keys: dict[str, dict[str, str]] = {"parameters": {}, "variables": {}, table: {"token": "${TOKEN}"}}
    with pytest.raises(UnusableInput, match=f"tasks.t.{table}.token: the environment variable TOKEN is not set"):
        build_host_command(build_task(**keys), DEFAULT_TASK, "")
