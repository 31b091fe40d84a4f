"""A whole run on a real SGLang server with rollouts ahead of the learner, so that weights change during turns.

The server's request log, which the run does not read, contains the weight version of each token.

A step uses 2 of the 200 started groups, and the server runs 16 of their 1,600 trajectories at a time. So turns run
during nearly every update, even on a busy machine, where the learner takes several times as long.
"""

import json
from collections.abc import Iterable
from itertools import pairwise

import msgspec
import numpy as np
import pytest

from asterism.bus.codec import decode
from asterism.bus.event_log.reader import read_events
from asterism.bus.messages import TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import from_cold_start_of, metrics, read_conserved_summary, whole_run
from tests.sglang.runs import OWN_SERVER, PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.sglang, pytest.mark.timeout(2 * PATIENCE_S)]

ARGUMENTS = (
    "--enable-deterministic-inference",
    "--log-requests",
    "--log-requests-level=1",
    "--log-requests-format=json",
)
STEPS = 8
AHEAD = (
    *("rl.max_staleness=1", "rl.surplus_groups=carry", "rl.group_oversampling=100.0", "rl.prompts=2", "rl.rollouts=8"),
    f"rl.steps={STEPS}",
    *(f"sglang.arguments={json.dumps(ARGUMENTS)}", "sglang.port=31060"),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cold_start: RunFolder) -> RunFolder:
    runs = tmp_path_factory.mktemp("partial")
    settings = (*OWN_SERVER, *AHEAD, *from_cold_start_of(cold_start))
    return whole_run(runs, *settings, patience_s=PATIENCE_S)[0]


class Span(msgspec.Struct):
    version: str
    start: int
    end: int


class Meta(msgspec.Struct):
    id: str  # the engine's request id, INSTANCE:TRAJECTORY-...
    weight_versions: list[Span]

    @property
    def trajectory_id(self) -> int:
        sequence = self.id.partition(":")[2]
        return int(sequence[: sequence.index("-", 1)])

    @property
    def versions(self) -> list[int]:
        return [int(span.version) for span in self.weight_versions for _ in range(span.start, span.end)]


class Out(msgspec.Struct):
    meta_info: Meta


class Finished(msgspec.Struct):
    """The entry that the server logs at the end of a request."""

    out: Out


def read_server_log(folder: RunFolder) -> list[tuple[int, list[int]]]:
    """Return the trajectory id and token versions of each request in the server's log, in order of
    completion. Probes of new weights have negative ids."""
    lines = (folder.logs / "sglang-0.log").read_text().splitlines()
    ends = [line[line.index("{") :] for line in lines if '"request.finished"' in line]
    metas = [msgspec.json.decode(end, type=Finished).out.meta_info for end in ends]
    return [(meta.trajectory_id, meta.versions) for meta in metas if meta.trajectory_id >= 0]


def read_event_log(folder: RunFolder) -> dict[int, list[int]]:
    """Return the versions of the generated tokens in the event log, by finished trajectory."""
    events = read_events(folder.events / "head.sqlite", kinds=["TrajectoryFinished"])
    messages = [decode(event.frame).message for event, _ in events]
    return {
        message.trajectory_id: np.frombuffer(message.record.versions, np.int32)[
            np.frombuffer(message.record.loss_mask, np.uint8).astype(bool)
        ].tolist()
        for message in messages
        if isinstance(message, TrajectoryFinished)
    }


def list_updates_within(token_versions: Iterable[list[int]]) -> list[int]:
    """List the weight versions that arrived in the middle of at least one of these token sequences."""
    return sorted({newer for versions in token_versions for older, newer in pairwise(versions) if newer > older})


def test_every_tokens_version_in_the_event_log_equals_the_servers(folder: RunFolder) -> None:
    server_versions: dict[int, list[int]] = {}
    for trajectory_id, versions in read_server_log(folder):
        server_versions.setdefault(trajectory_id, []).extend(versions)
    logged_versions = read_event_log(folder)
    assert logged_versions == {trajectory_id: server_versions[trajectory_id] for trajectory_id in logged_versions}
    assert list_updates_within(logged_versions.values())


def test_requests_continue_under_new_weights(folder: RunFolder) -> None:
    assert list_updates_within(versions for _, versions in read_server_log(folder))


def test_the_run_succeeds_and_replays(folder: RunFolder) -> None:
    summary = read_conserved_summary(folder, "aborted")
    assert summary["trajectories_failed"] == summary["trajectories_abandoned"] == 0
    steps = metrics(folder, "step")
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert max(step["staleness_max"] for step in steps) == 1.0
