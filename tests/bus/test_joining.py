"""Coming onto a run's bus, over ZeroMQ and in process: the same for who joins."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from bus.in_process import Hub
from bus.joining import in_process, over_zeromq
from bus.messages import RunFinished
from configs.load import load_run
from configs.run_folder import RunFolder

RUN = load_run(Path("configs/tiny.toml"), [])


@pytest.mark.parametrize("kind", ["zeromq", "in process"])
def test_who_has_joined_is_reached_by_name_in_the_session_that_it_says(kind: str, tmp_path: Path) -> None:
    async def scenario() -> tuple[str, int]:
        folder = RunFolder(tmp_path)
        folder.sockets.mkdir()
        join = over_zeromq(RUN, folder) if kind == "zeromq" else in_process(RUN, Hub())
        head, learner = join("head", 0), join("learner", 7)
        await learner.send("head", RunFinished(3))
        delivery = await head.receive_delivery()
        head.acknowledge(delivery)
        for bus in (learner, head):
            await bus.close()
        for socket in folder.sockets.iterdir():
            socket.unlink()
        folder.sockets.rmdir()
        return delivery.sender, delivery.session

    assert asyncio.run(scenario()) == ("learner", 7)
