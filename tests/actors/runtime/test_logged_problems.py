"""Problems are read from the log of a rollout process and kept once per problem, not once per group."""

from pathlib import Path
from typing import NoReturn

from asterism.actors.runtime.logged_problems import LoggedProblems
from asterism.bus.codec import encode
from asterism.bus.event_log.writer import EventLog
from asterism.bus.messages import Envelope, StartGroup
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.problem_order import ProblemOrder
from asterism.policies.seeded_random import TRAIN, mix
from tests.fakes import start_group

NUM_PROBLEMS, NUM_EPOCHS = 5, 40
RUN = RunConfig(name="r", seed=3)


def load_no_file() -> NoReturn:
    raise AssertionError("the log has every problem")


def log_group(log: EventLog, position: int) -> int:
    """Log a group, and return the index of its problem."""
    index = ProblemOrder((NUM_PROBLEMS,), [1.0], RUN.seed).select(position)
    seed = mix(RUN.seed, TRAIN, position)
    group = start_group(1, position, group_id=position, problem=f"problem {index}", ground_truth="1", seed=seed)
    envelope = Envelope("head/buffer", "rollout-0", group)
    log.append(float(position), "rollout-0", "head/buffer", StartGroup.__name__, None, encode(envelope))
    return index


def test_a_run_of_many_epochs_keeps_each_problem_once(tmp_path: Path) -> None:
    path = tmp_path / "rollout-0.sqlite"
    log = EventLog(path)
    indices = [log_group(log, position) for position in range(NUM_PROBLEMS * NUM_EPOCHS)]
    log.close()
    problems = LoggedProblems(path, RUN, "train", (NUM_PROBLEMS,), load_no_file, may_grow=lambda: False)
    assert [problems[index].name for index in indices] == [f"problem {index}" for index in indices]
    assert problems._by_seed == {}  # pyright: ignore[reportPrivateUsage]
    assert len(problems._by_index) == NUM_PROBLEMS  # pyright: ignore[reportPrivateUsage]
