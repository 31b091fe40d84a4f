"""Who is who in a run: the processes, and the deciders that each of them holds.

Live processes and replay build their deciders here, from the run's folder alone: so a replay decides as the run did.
"""

from __future__ import annotations

from actors.problems import Problems, load_problems
from bus.messages import EngineLeft
from bus.transport import Bus
from configs.run_folder import RunFolder
from configs.schema import Run
from engine.tokenizer import FastTokenizer, load_tokenizer
from policies.accounting import Recorder
from policies.arbiter import Arbiter
from policies.decider import Decider
from policies.group_buffer import GroupBuffer
from policies.recipe import Recipe
from policies.rollout import Rollout
from policies.trajectory import Rules

HEAD, ROLLOUT, EXECUTOR, LEARNER, LAUNCHER = "head", "rollout-0", "executor-0", "learner", "launcher"
WEIGHTS = "weights"  # the process that serves them to other nodes
STOP_WITHIN_S = 2.0
SERVER_STOPS_WITHIN_S = 4.0


def executors(run: Run) -> tuple[str, ...]:
    """Their processes; an executor's address is that of one life of it, `executor-0/1` the first."""
    return tuple(f"executor-{index}" for index in range(run.sandbox.executors))


def generators(run: Run) -> tuple[str, ...]:
    return tuple(f"generator-{index}" for index in range(run.engine.num_engines))


def index_of(process: str) -> int:
    """Of `generator-2`, and of the third generator of another node, `generator-2@1`: 2."""
    return int(process.partition("@")[0].rpartition("-")[2])


def stops_within_s(run: Run, process: str) -> float:
    """From Shutdown on; then it is killed. A generator has longer that ends a server first."""
    serves = run.engine.kind == "sglang" and process.startswith("generator-")
    return STOP_WITHIN_S + (SERVER_STOPS_WITHIN_S if serves else 0.0)


async def tell_engine_left(bus: Bus, left: EngineLeft) -> None:
    for told in (f"{HEAD}/arbiter", f"{HEAD}/recipe", ROLLOUT):
        await bus.send(told, left)


def rules(run: Run, tokenizer: FastTokenizer) -> Rules:
    dialogue = run.dialogue
    return Rules(
        tools=dialogue.tools,
        response_tokens=dialogue.response_tokens,
        max_turns=dialogue.max_turns,
        max_calls_per_turn=dialogue.max_calls_per_turn,
        result_characters=dialogue.result_characters,
        top_p=run.sampling.top_p,
        top_k=run.sampling.top_k,
        stop_token_ids=(tokenizer.end_of_turn_id,),
        result_format=dialogue.result_format,
        arbiter=f"{HEAD}/arbiter",
        buffer=f"{HEAD}/buffer",
        launcher=LAUNCHER,
    )


def head_deciders(run: Run, problems: Problems) -> dict[str, Decider]:
    engines = generators(run)
    return {
        "arbiter": Arbiter(
            run.arbiter.policy, run.dialogue.response_tokens, holder=ROLLOUT, completes=run.rl.oversubscribe > 1
        ),
        "buffer": GroupBuffer(run, problems.train, problems.test, (ROLLOUT,)),
        "recipe": Recipe(
            run.rl.steps, run.evaluation.questions, run.sampling.temperature, engines, run.rl.max_staleness
        ),
        "recorder": Recorder(run.rl.steps),
    }


def deciders_of(process: str, run: Run, folder: RunFolder) -> dict[str, Decider]:
    """The deciders of a process by name. Raises engine.datasets.DatasetError and tokenizer errors."""
    tokenizer = load_tokenizer(folder.expand(run.model.checkpoint))
    if process == HEAD:
        return head_deciders(run, load_problems(run, folder, tokenizer))
    return {process: Rollout(rules(run, tokenizer), tokenizer)}
