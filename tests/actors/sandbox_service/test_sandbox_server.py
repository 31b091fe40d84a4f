"""No message ends the server of a sandbox, and its clients do not affect each other."""

import asyncio
import os
import random
import socket
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from asterism.actors.executor import Executor
from asterism.actors.sandbox_service import sandbox_server
from asterism.actors.sandbox_service.sandbox_client import (
    SERVED_ADDRESS,
    check_private_folder,
    get_default_folder,
    is_listening,
)
from asterism.actors.sandbox_service.sandbox_server import ClientGateway, ClientTable, GuardedSandbox
from asterism.bus import messages as msg
from asterism.bus.bus import Bus
from asterism.bus.transport.in_process import Hub
from asterism.configs.errors import UnusableInput
from asterism.policies.seeded_random import mix
from asterism.sandbox.contract import CodeResult, Grade, Isolation
from tests.bus.samples import KINDS, sample

HONEST = "client-1"


class BrittleSandbox:
    """A sandbox that answers calls with the number of cells of the notebook, and raises if code is not a number."""

    def __init__(self) -> None:
        self.notebooks: dict[int, int] = {}

    async def start(self) -> Isolation:
        return Isolation("brittle", (), False, ())

    async def run(self, call: msg.CodeRequested) -> CodeResult:
        int(call.code)
        count = self.notebooks[call.trajectory_id] = self.notebooks.get(call.trajectory_id, 0) + 1
        return CodeResult(msg.CodeOk(msg.Output(f"{count}")), 0.0)

    async def grade(self, submission: msg.AnswerSubmitted) -> Grade:
        return Grade(int(submission.answer) == int(submission.ground_truth), 0.0)

    async def wait_until_broken(self) -> NoReturn:
        while True:
            await asyncio.Event().wait()

    def restore_notebook(self, trajectory_id: int, cells: Sequence[msg.CodeRequested]) -> None:
        self.notebooks[trajectory_id] = int(cells[0].code)

    async def end_notebook(self, trajectory_id: int) -> None:
        del self.notebooks[trajectory_id]

    async def close(self) -> None:
        return


class ServedClients:
    """A server and its clients in one process."""

    def __init__(self, max_clients: int) -> None:
        self.living: set[str] = set()
        self.table = ClientTable(Path("unused"), max_clients)
        self.table._is_alive = self.living.__contains__  # pyright: ignore[reportPrivateUsage]
        self.sandbox = BrittleSandbox()
        self._hub = Hub()
        self._bus = self._hub.join(SERVED_ADDRESS, 100)
        self._hub.members[SERVED_ADDRESS].accepts_peer = self.table.accept
        self.gateway = ClientGateway(self._bus, self.table)
        self.serving = asyncio.create_task(Executor(self.gateway, GuardedSandbox(self.sandbox)).run())

    def connect(self, name: str, epoch: int = 1) -> Bus:
        self.living.add(name)
        self._hub.members.pop(name, None)
        return self._hub.join(name, 100, epoch)

    async def close(self) -> None:
        assert not self.serving.done()
        self.serving.cancel()
        await asyncio.gather(self.serving, return_exceptions=True)


@asynccontextmanager
async def serving(max_clients: int = 10) -> AsyncIterator[ServedClients]:
    served = ServedClients(max_clients)
    yield served
    await served.close()


def cell(trajectory_id: int, number: int = 0, code: str = "1") -> msg.CodeRequested:
    return msg.CodeRequested(trajectory_id, number, "jupyter_code", code, "")


async def ask(client: Bus, message: msg.AnyMessage) -> msg.AnyMessage:
    await client.send(SERVED_ADDRESS, message)
    return (await client.receive()).message


async def ask_in_vain(client: Bus, message: msg.AnyMessage) -> str:
    """Return the cause of the failure that the server answers."""
    answer = await ask(client, message)
    assert isinstance(answer, msg.CallFailed)
    return answer.cause


async def count_cells(client: Bus, trajectory_id: int) -> str:
    answer = await ask(client, cell(trajectory_id))
    assert isinstance(answer, msg.CodeFinished), answer
    assert answer.trajectory_id == trajectory_id
    assert isinstance(answer.outcome, msg.CodeOk)
    return answer.outcome.output.stdout


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(KINDS), st.integers(0, 2**32), st.sampled_from(("", "head", "x" * 500)))))
def test_no_message_of_any_kind_ends_the_service(drawn: list[tuple[type[msg.AnyMessage], int, str]]) -> None:
    async def scenario() -> None:
        async with serving() as served:
            honest, hostile = served.connect(HONEST), served.connect("client-2")
            for kind, seed, sender in drawn:
                for name in {sender, hostile.process}:
                    await hostile.send(SERVED_ADDRESS, sample(kind, random.Random(seed)), name or None)
            await hostile.send_frame(SERVED_ADDRESS, b"no message")
            counting = asyncio.create_task(count_cells(honest, 7))
            await asyncio.wait({counting, served.serving}, return_when=asyncio.FIRST_COMPLETED)
            assert not served.serving.done()
            assert await counting == "1"

    with capture_logs():
        asyncio.run(scenario())


async def test_messages_that_once_ended_the_service_are_answered_or_dropped() -> None:
    with capture_logs() as logs:
        async with serving() as served:
            client = served.connect(HONEST)
            for message in (msg.SessionRestored(9, ()), msg.SessionEnded(9), msg.Shutdown()):
                await client.send(SERVED_ADDRESS, message)
            failed = await ask(client, cell(3, 4, "no number"))
            assert failed == msg.CallFailed(3, 4, "sandbox: ValueError in the sandbox server", SERVED_ADDRESS)
            await ask_in_vain(client, msg.AnswerSubmitted(3, "x", "1"))
    assert [(log["event"], log.get("kind")) for log in logs if "refused" in log["event"]] == [
        ("message.refused", "Shutdown")
    ]
    assert sum(log["event"] == "request.failed" for log in logs) == 4


async def test_each_client_has_its_own_trajectories() -> None:
    extremes = (0, 7, -1, -(2**63), 2**64 - 1)
    async with serving() as served:
        one, other = served.connect(HONEST), served.connect("client-2")
        for trajectory_id in extremes:
            assert [await count_cells(client, trajectory_id) for client in (one, one, other)] == ["1", "2", "1"]
            await other.send(SERVED_ADDRESS, msg.SessionEnded(trajectory_id))
            assert await count_cells(other, trajectory_id) == "1"
            assert await count_cells(one, trajectory_id) == "3"
        assert len(served.sandbox.notebooks) == 2 * len(extremes)
        # The seeds of a call do not depend on the client.
        assert {mix(each) for each in served.sandbox.notebooks} == {mix(each) for each in extremes}


async def test_clients_over_the_limit_get_a_clear_answer_until_another_client_ends() -> None:
    async with serving(max_clients=1) as served:
        first, second = served.connect(HONEST), served.connect("client-2")
        assert await count_cells(first, 7) == "1"
        cause = await ask_in_vain(second, cell(7))
        assert cause.startswith("the sandbox server has 1 clients already; end one")
        served.living -= {HONEST, "client-2"}
        await served.gateway.forget_ended_clients()
        third = served.connect("client-3")
        assert await count_cells(third, 7) == "1"
        assert len(served.sandbox.notebooks) == 1, "the notebook of the first client has ended with it"


async def test_another_process_of_the_same_name_is_another_client() -> None:
    async with serving() as served:
        assert await count_cells(served.connect(HONEST, epoch=1), 7) == "1"
        assert await count_cells(served.connect(HONEST, epoch=2), 7) == "1"
        assert len(served.sandbox.notebooks) == 1


async def test_a_client_with_too_many_notebooks_gets_a_clear_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "MAX_NOTEBOOKS", 2)
    async with serving() as served:
        client = served.connect(HONEST)
        assert [await count_cells(client, each) for each in (1, 2)] == ["1", "1"]
        assert await ask_in_vain(client, cell(3)) == "this client has 2 notebooks already; end one"
        await client.send(SERVED_ADDRESS, msg.SessionEnded(1))
        assert await count_cells(client, 3) == "1"


async def test_the_cells_that_the_server_keeps_for_a_client_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_server, "MAX_CELL_BYTES", 1 << 20)
    full = "the cells of this client's notebooks have more than 1 MiB; end notebooks"
    large = (cell(1, 0, "3"), cell(1, 1, "x" * (400 << 10)), cell(1, 2, "x" * (400 << 10)))
    async with serving() as served:
        client, other = served.connect(HONEST), served.connect("client-2")
        for trajectory_id in (1, 1, 1, 2, 3):  # each restore of 1 replaces the previous one; 2 and 3 do not fit
            await client.send(SERVED_ADDRESS, msg.SessionRestored(trajectory_id, large))
        assert await count_cells(client, 1) == "4"
        for trajectory_id in (2, 3):
            assert await ask_in_vain(client, cell(trajectory_id)) == full, "its state would lack the restored cells"
        assert await ask_in_vain(client, cell(4, 0, "x" * (400 << 10))) == full
        assert len(served.sandbox.notebooks) == 1
        assert await count_cells(other, 1) == "1"
        await client.send(SERVED_ADDRESS, msg.SessionEnded(1))
        await client.send(SERVED_ADDRESS, msg.SessionRestored(2, large))
        assert await count_cells(client, 2) == "4"


def test_only_listening_clients_with_valid_names_are_accepted(tmp_path: Path) -> None:
    table = ClientTable(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / HONEST))
        listener.listen()
        names = ("client-2", "client-x", "client-1/2", "", SERVED_ADDRESS, "client-" + "1" * 300, "../" + HONEST)
        assert [name for name in (HONEST, *names) if table.accept(name)] == [HONEST]
        assert table.remove_ended() == {}
    assert list(table.remove_ended()) == [HONEST]
    assert list(tmp_path.iterdir()) == [], "the socket of a killed client"


def test_a_folder_with_access_for_others_is_refused(tmp_path: Path) -> None:
    check_private_folder(tmp_path)
    tmp_path.chmod(0o711)
    with pytest.raises(UnusableInput, match=f"other users have access to it; run `chmod 700 {tmp_path}`"):
        check_private_folder(tmp_path)


def test_the_default_folder_is_private_to_the_user(tmp_path: Path) -> None:
    assert get_default_folder({"XDG_RUNTIME_DIR": str(tmp_path)}) == tmp_path / "asterism-sandbox"
    assert get_default_folder({"XDG_RUNTIME_DIR": "/nowhere"}).name == f"asterism-{os.getuid()}-served"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_a_folder_or_listener_of_another_user_is_refused() -> None:
    with tempfile.TemporaryDirectory() as name, socket.socket(socket.AF_UNIX) as listener:
        os.chown(name, 1000, 1000)
        with pytest.raises(UnusableInput, match="the folder of another user"):
            check_private_folder(Path(name))
        listener.bind(f"{name}/executor-0")
        os.seteuid(1000)
        try:
            listener.listen()  # the kernel reports this user to clients
        finally:
            os.seteuid(0)
        assert not is_listening(Path(name, "executor-0"))
