"""A whole run on a real SGLang server whose rollouts run ahead of the learner: new weights come in the middle of turns.

The server says in a log of its own, which the run does not read, which version each token of a request is of.

That turns are under way when weights come follows from the sizes: a step takes 2 of the 14 groups that are under way, and
the server runs 16 of their 112 trajectories at a time; the others wait.
"""

from __future__ import annotations

import json

import msgspec
import numpy as np
import pytest

from bus.codec import decode
from bus.event_reading import read_events
from bus.messages import TrajectoryFinished
from configs.run_folder import RunFolder
from tests.actors.running import adds_up, finish, from_cold_start_of, launch, metrics
from tests.sglang.runs import OWN_SERVER, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

ARGUMENTS = (
    "--enable-deterministic-inference",
    "--log-requests",
    "--log-requests-level=1",
    "--log-requests-format=json",
)
STEPS = 3
AHEAD = (
    *("rl.max_staleness=1", "rl.leftovers=carry", "rl.oversubscribe=6.0", "rl.prompts=2", "rl.rollouts=8"),
    f"rl.steps={STEPS}",
    *(f"sglang.arguments={json.dumps(ARGUMENTS)}", "sglang.port=31060"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cold_start: RunFolder) -> RunFolder:
    runs = tmp_path_factory.mktemp("partial")
    with launch(runs, *OWN_SERVER, *AHEAD, *from_cold_start_of(cold_start)) as process:
        try:
            output = finish(process, PATIENCE_S)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return RunFolder(runs / "demo")


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    id: str  # LIFE:TRAJECTORY-..., as the engine names its requests
    weight_versions: list[Span]

    @property
    def trajectory_id(self) -> int:
        return int(self.id.partition(":")[2].partition("-")[0])

    @property
    def versions(self) -> list[int]:
        return [int(span.version) for span in self.weight_versions for _ in range(span.start, span.end)]


class Out(msgspec.Struct):
    meta_info: Meta


class Finished(msgspec.Struct):
    """What the server logs of a request at its end."""

    out: Out


def said_by_server(folder: RunFolder) -> list[tuple[int, list[int]]]:
    """Of each request in the order of their ends: its trajectory, and its tokens' versions."""
    lines = (folder.logs / "sglang-0.log").read_text().splitlines()
    ends = [line[line.index("{") :] for line in lines if '"request.finished"' in line]
    metas = [msgspec.json.decode(end, type=Finished).out.meta_info for end in ends]
    return [(meta.trajectory_id, meta.versions) for meta in metas]


def finished(folder: RunFolder) -> dict[int, list[int]]:
    """By trajectory that ended by itself, the versions of the tokens that were generated, as the event log has them."""
    events = read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    messages = [decode(event.frame).message for event, _ in events]
    return {
        message.trajectory_id: np.frombuffer(message.versions, np.int32)[
            np.frombuffer(message.loss_mask, np.uint8).astype(bool)
        ].tolist()
        for message in messages
        if isinstance(message, TrajectoryFinished)
    }


def test_every_tokens_version_in_the_event_log_is_the_servers(folder: RunFolder) -> None:
    theirs: dict[int, list[int]] = {}
    for trajectory_id, versions in said_by_server(folder):
        theirs.setdefault(trajectory_id, []).extend(versions)
    ours = finished(folder)
    assert ours == {trajectory_id: theirs[trajectory_id] for trajectory_id in ours}
    assert {(0, 1), (1, 2)} <= {tuple(sorted(set(versions))) for versions in ours.values()}


def test_requests_go_on_under_new_weights(folder: RunFolder) -> None:
    mixed = {tuple(sorted(set(versions))) for _, versions in said_by_server(folder)}
    assert {(0, 1), (1, 2)} <= mixed


def test_the_run_ends_well_and_replays(folder: RunFolder) -> None:
    summary = json.loads(folder.summary.read_text())
    assert adds_up(summary, "aborted")
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    assert summary["replay_identical"] is True
    steps = metrics(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["staleness_max"] for step in steps) == 1.0
