"""With the rollout policies of examples/, and with the interface that they use, each trajectory ends once."""

from collections import Counter
from collections.abc import Callable
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from asterism.bus import messages as msg
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import RlConfig
from asterism.policies.rollout.rollout import Rollout
from asterism.policies.rollout.rollout_policy import IndependentTrajectories, load_rollout_policy
from examples.rollout_policies import BestOfN, FixedTurns, TreeSearch
from tests.actors.runs.running import Start, read_conserved_summary
from tests.fakes import ANSWER, CALL, PROMPT, TOKENIZER, generated, rules

SIZE = 4
Policy = Callable[[], IndependentTrajectories | TreeSearch]
END = msg.TrajectoryFinished | msg.TrajectoryFailed | msg.TrajectoryAborted


class World:
    """Answers the messages of a rollout process in a random order."""

    def __init__(self, policy: Policy, seed: int = 0, calls: int = 1, size: int = SIZE) -> None:
        self.rollout = Rollout({"": rules()}, policy)
        self.random, self.calls = Random(seed), calls
        self.pending: list[msg.AnyMessage] = []
        self.requests: list[msg.TurnRequested] = []
        self.ended: list[END] = []
        self.executor = 0
        self.decide(msg.ExecutorJoined("executor-0/1", 8))
        self.decide(msg.StartGroup(0, "train", "q:1", "2", PROMPT, size, 0, 1.0, 5))

    def decide(self, event: msg.AnyMessage) -> None:
        for send in self.rollout.decide(0.0, event):
            self.answer(send.to, send.message)

    def answer(self, to: str, message: msg.AnyMessage) -> None:
        match message:
            case msg.LeaseRequested(trajectory_id=tid, lease=lease):
                self.pending.append(msg.LeaseGranted(tid, "generator-0", 4000, lease, 0.0, ""))
            case msg.TurnRequested(trajectory_id=tid, turn=turn, lease=lease):
                self.requests.append(message)
                turns = generated(tid, turn, CALL if turn < self.calls else ANSWER, lease=lease)
                logprobs = np.full(len(turns.token_ids) // 4, -(message.seed % 97) / 97 - 0.01, np.float32).tobytes()
                self.pending.append(replace(turns, logprobs=logprobs))
            case msg.CodeRequested(trajectory_id=tid, call=call):
                self.pending.append(msg.CodeFinished(tid, call, msg.CodeOk(msg.Output("1")), 0.1, to))
            case msg.AnswerSubmitted(trajectory_id=tid):
                self.pending.append(msg.AnswerGraded(tid, 1.0, 0.1, to))
            case msg.TrajectoryFinished() | msg.TrajectoryFailed() | msg.TrajectoryAborted():
                self.ended.append(message)
            case _:
                pass  # after TurnAborted, the answer of the turn is already pending

    def lose_executor(self) -> None:
        self.decide(msg.ExecutorLeft(f"executor-{self.executor}/1", "killed"))
        self.executor += 1
        self.decide(msg.ExecutorJoined(f"executor-{self.executor}/1", 8))

    def step(self) -> None:
        self.decide(self.pending.pop(self.random.randrange(len(self.pending))))

    def run(self) -> list[msg.TrajectoryFinished]:
        while self.pending:
            self.step()
        assert not self.rollout.trajectories
        return sorted(
            (each for each in self.ended if isinstance(each, msg.TrajectoryFinished)), key=lambda e: e.trajectory_id
        )


def read_text(finished: msg.TrajectoryFinished) -> str:
    return TOKENIZER.decode(msg.bytes_to_ids(finished.record.token_ids))


@given(st.sampled_from([IndependentTrajectories, FixedTurns, BestOfN, TreeSearch]), st.integers(0, 10_000))
def test_each_trajectory_ends_once_in_spite_of_faults(policy: Policy, seed: int) -> None:
    world, random = World(policy, seed, calls=seed % 3), Random(seed)
    while world.pending:
        fate = random.random()
        if fate < 0.05:
            world.lose_executor()
        elif fate < 0.08:
            generating = [each for each in world.rollout.trajectories.values() if each.phase == "generating"]
            for each in generating[:1]:
                answers = [
                    message for message in world.pending if getattr(message, "trajectory_id", -1) == each.trajectory_id
                ]
                world.pending.remove(answers[-1])
                world.pending.append(msg.TurnFailed(each.trajectory_id, each.turn, each.lease, "engine: gone"))
        elif fate < 0.09:
            world.decide(msg.GroupAborted(0, 0, SIZE, "the step ended without it"))
        if world.pending:
            world.step()
    assert Counter(each.trajectory_id for each in world.ended) == Counter(range(SIZE))


def test_a_branch_starts_after_a_tool_call_with_the_turns_of_its_source() -> None:
    world = World(TreeSearch, calls=2)
    assert [each.turns for each in world.run()] == [3] * SIZE
    first = {request.trajectory_id: request for request in reversed(world.requests)}
    assert first[0].turn == 0
    assert all(first[each].turn > 0 for each in range(1, SIZE))
    assert len({request.seed for request in first.values()}) == SIZE


def test_parked_siblings_start_from_the_prompt_if_no_turn_has_a_call() -> None:
    world = World(TreeSearch, calls=0)
    assert [each.turns for each in world.run()] == [1] * SIZE
    assert [request.turn for request in world.requests] == [0] * SIZE


def test_the_best_candidate_of_each_turn_is_kept() -> None:
    world = World(BestOfN, calls=1, size=1)
    (finished,) = world.run()
    by_turn = [[request.seed for request in world.requests if request.turn == turn] for turn in (0, 1)]
    assert [len(set(seeds)) for seeds in by_turn] == [BestOfN.num_candidates] * 2
    logprobs = np.frombuffer(finished.record.logprobs, np.float32)[finished.record.prompt_tokens :]
    kept = {float(each) for each in logprobs if each}
    assert kept == {max(np.float32(-(seed % 97) / 97 - 0.01).item() for seed in seeds) for seeds in by_turn}


def test_fixed_turns_request_a_check_after_an_answer() -> None:
    for finished in World(FixedTurns, calls=0).run():
        assert finished.turns == FixedTurns.num_turns
        assert read_text(finished).count(FixedTurns.request) == FixedTurns.num_turns - 1
        assert read_text(finished).count("boxed") == FixedTurns.num_turns


class Shrinking(IndependentTrajectories):
    def start(self, rules, group, now):  # pyright: ignore
        return super().start(rules, group, now)[1:]  # pyright: ignore


class Foreign(IndependentTrajectories):
    def advance(self, rules, trajectory, now, event, live):  # pyright: ignore
        (own,) = super().advance(rules, trajectory, now, event, live)  # pyright: ignore
        return [own, (replace(own[0], trajectory_id=99), [])]  # pyright: ignore


def test_a_policy_that_loses_or_invents_a_trajectory_is_refused() -> None:
    with pytest.raises(UnusableInput, match=r"rl.rollout_policy: start must return one transition"):
        World(Shrinking)
    with pytest.raises(UnusableInput, match=r"changed 99, which is no live sibling"):
        World(Foreign).run()


def test_a_policy_is_loaded_by_name_or_import_path() -> None:
    assert load_rollout_policy(RlConfig()) is IndependentTrajectories
    loaded = load_rollout_policy(RlConfig(rollout_policy="examples.rollout_policies:TreeSearch"))
    assert loaded is TreeSearch
    with pytest.raises(UnusableInput, match=r"rl.rollout_policy: "):
        load_rollout_policy(RlConfig(rollout_policy="examples.rollout_policies:Absent"))


@pytest.mark.slow
@pytest.mark.nightly  # tests/actors/runs/test_full_disk.py has a run with TreeSearch
@pytest.mark.parametrize("name", ["BestOfN", "FixedTurns"])
def test_a_run_with_the_policy_replays_identically(name: str, start_trained: Start) -> None:
    run = start_trained(f"rl.rollout_policy=examples/rollout_policies.py:{name}", "rl.steps=1")
    run.succeed()
    read_conserved_summary(run.folder)
