"""The first warning of a run with a planted fault names the fault; a run without a fault has no warning."""

import hashlib
import json
import os
from pathlib import Path
from typing import NamedTuple

import pytest

from asterism.configs.run_folder import RunFolder
from tests.actors.runs.running import PATIENCE_S, Start, finish, metrics, whole_run

pytestmark = [pytest.mark.slow, pytest.mark.nightly, pytest.mark.timeout(900)]
STEPS = 6
SETTINGS = (
    f"rl.steps={STEPS}",
    "rl.prompts=8",
    "rl.rollouts=16",
    "evaluation.questions=16",
    "sandbox.spare_notebooks=64",
)

REWARDS = """
import hashlib

def score(completions, question):
    if hashlib.blake2b(question[0].encode()).digest()[0] % 8 == 0:
        raise ValueError("no opinion on this question")
    return [0.0 for _ in completions]
"""
# The run's processes execute these programs at their start, because the code has no switch for such faults.
IN_GENERATORS = """
import sys

if "generator-0" in sys.orig_argv:
    import numpy as np
    from msgspec.structs import replace
    from asterism.engine.inference import embedded

    Engine = embedded.EmbeddedEngine
    load, generate = Engine.load_weights, Engine.generate
"""
SLOW_TOOL = """
import sys

if "executor-0" in sys.orig_argv:
    from msgspec.structs import replace
    from asterism.sandbox.fork_server_sandbox import ForkServerSandbox

    run = ForkServerSandbox.run

    async def wait_first(self, call):
        return await run(self, replace(call, code="import time; time.sleep(60)"))

    ForkServerSandbox.run = wait_first
"""
LOST_WEIGHTS = (
    IN_GENERATORS
    + """
    async def lose(self, weights):
        if weights.version == 0:
            return await load(self, weights)
        import asyncio
        future = asyncio.get_running_loop().create_future()
        thread = self._require_thread()
        await self._post_and_wait(future, lambda: thread.load_weights(lambda core: weights.version, future))
        self._version = weights.version

    Engine.load_weights = lose
"""
)
CONFIDENT_TOKENS = (
    IN_GENERATORS
    + """
    tokens = 0

    async def disagree(self, request, on_tokens=None):
        global tokens
        result = await generate(self, request, on_tokens)
        tokens += len(result.token_ids)
        unlikely = np.flatnonzero(result.logprobs < -2.5)
        if tokens < 1000 or not len(unlikely):
            return result
        tokens, logprobs = 0, result.logprobs.copy()
        logprobs[unlikely[0]] = -0.1
        return replace(result, logprobs=logprobs)

    Engine.generate = disagree
"""
)


class Fault(NamedTuple):
    name: str
    settings: tuple[str, ...]
    cause: str  # text of the first warning
    start_up: str = ""


FAULTS = [
    Fault("divergence", ("learner.optimizer.lr=0.04",), "learner.optimizer.lr"),
    Fault("tool_that_times_out", ("sandbox.time_limit_s=0.3",), "100% of the calls of jupyter_code", SLOW_TOOL),
    Fault(
        "reward_that_raises",
        ("reward.functions.correct=math", "reward.functions.opinion={rewards}:score", "evaluation.success=correct"),
        "no opinion on this question",
    ),
    Fault("rows_without_answers", ("data.train={rows}",), "field `answer`: missing"),
    Fault("lost_weights", (), "did not receive the published weights", LOST_WEIGHTS),
    Fault(
        "lost_adapters",
        ("learner.lora.rank=4", "learner.lora.publish=adapters", "learner.optimizer.lr=4e-3"),
        "did not receive the published weights",
        LOST_WEIGHTS,
    ),
    Fault("confident_disagreement", (), "probability of at least 50% in the engine", CONFIDENT_TOKENS),
]


def list_warnings(output: str) -> list[str]:
    """Return the warnings of the start, and later lines of health checks, failed trajectories and errors."""
    marks = ("warning: ", ": health.", "failed, the first one of its kind", "failed: ", "error: ")
    return [line for line in output.splitlines() if any(mark in line for mark in marks)]


def remove_answers(rows: Path, target: Path) -> None:
    """Remove the answers from about every eighth row."""
    changed: list[str] = []
    for line in rows.read_text().splitlines():
        row = json.loads(line)
        if hashlib.blake2b(line.encode()).digest()[0] % 8 == 0:
            del row["answer"]
        changed.append(json.dumps(row))
    target.write_text("\n".join(changed) + "\n")


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_first_warning_names_the_cause(
    tmp_path: Path, fault: Fault, finished: RunFolder, start_trained: Start
) -> None:
    rewards, rows = tmp_path / "rewards.py", tmp_path / "rows.jsonl"
    rewards.write_text(REWARDS)
    remove_answers(finished.data / "train.jsonl", rows)
    (tmp_path / "sitecustomize.py").write_text(fault.start_up)
    settings = [each.format(rewards=rewards, rows=rows) for each in fault.settings]
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    run = start_trained(*SETTINGS, *settings, environment={**os.environ, "PYTHONPATH": path})
    output = finish(run.process, 2 * PATIENCE_S)
    assert fault.cause in [*list_warnings(output), "no warning"][0], output


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_healthy_run_has_no_warning(tmp_path: Path, seed: int) -> None:
    """After COLD_START, a sixth of the trajectories would reach the length limit."""
    learned = ("sft.steps=230", "sft.batch_size=32", "prepare.parameters.num_sft_dialogues=7360")
    settings = (*learned, *SETTINGS, f"seed={seed}", "rl.steps=12", "evaluation.every=4")
    folder, output = whole_run(tmp_path, *settings, patience_s=3 * PATIENCE_S)
    assert list_warnings(output) == []
    gaps = [step["probe_gap"] for step in metrics(folder, "step")]
    assert len(gaps) == 12
    assert max(gaps) < 1e-3
