"""The head's answer log has each answer once, with the results of the rollout and of its grader."""

from collections.abc import Sequence
from errno import ENOSPC
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace

from asterism.actors.evaluation.answer_log import (
    AnswerLog,
    AnswerObserver,
    drop_answers_after,
    extract_answer,
    find_last_turn,
    split_turns,
)
from asterism.analysis.evaluation.answer_records import AnswerRecord, AnswerTurn, read_answers
from asterism.bus import messages as msg
from asterism.configs.atomic_write import DiskError
from asterism.configs.errors import UnusableInput
from asterism.configs.schema.algorithm import Sampling
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.success import SuccessRule
from asterism.policies.decider import Send
from asterism.policies.dialogue.chat_format import build_dialogue_format
from asterism.policies.dialogue.dialogue_renderer import ChatMLRenderer
from asterism.policies.groups.evaluation_questions import PlannedAnswer
from asterism.policies.rollout.trajectory import Rules
from asterism.tasks.math_python import MATH_PYTHON
from tests.fakes import TOKENIZER, start_group
from tests.policies.groups.finished import finished

REQUEST = msg.EvaluationRequested("sampled", Sampling(), 9, 0)


def make_rules(**changes: Any) -> Rules:
    dialogue = DialogueConfig(tools=("jupyter_code",))
    renderer = ChatMLRenderer(TOKENIZER, build_dialogue_format(dialogue, MATH_PYTHON))
    return Rules(renderer, 99, 9, 1, 99, renderer.stop_token_ids, **changes)


def make_record(*parts: tuple[str, bool]) -> msg.TokenRecord:
    """Make a record with a prompt of one token. A part of the response is a text, and True for generated text."""
    encoded = [(TOKENIZER.encode(text, trusted=True), generated) for text, generated in parts]
    ids = [0, *(token for tokens, _ in encoded for token in tokens)]
    mask = bytes([0]) + b"".join(bytes([generated]) * len(tokens) for tokens, generated in encoded)
    return msg.TokenRecord(1, msg.ids_to_bytes(ids), mask, bytes(4 * len(ids)), bytes(4 * len(ids)))


def end_with(record: msg.TokenRecord, **changes: Any) -> msg.TrajectoryFinished:
    return replace(finished(0, 1.0, group_id=7), record=record, **changes)


ANSWER = make_record(("a <tool_call>x</tool_call>", True), ("42", False), (r"<answer>\boxed{4}</answer>", True))


def test_the_answer_is_taken_from_the_last_turn_and_the_response_is_split_into_turns() -> None:
    assert extract_answer(make_rules(), end_with(ANSWER)) == "4"
    turns = split_turns(make_rules(), ANSWER)
    assert [(turn.role, turn.text) for turn in turns] == [
        ("assistant", "a <tool_call>x</tool_call>"),
        ("environment", "42"),
        ("assistant", r"<answer>\boxed{4}</answer>"),
    ]
    assert sum(turn.tokens for turn in turns) == ANSWER.response_tokens
    assert find_last_turn(ANSWER) == ANSWER.num_tokens - turns[-1].tokens


@pytest.mark.parametrize("ending", ["no_answer", "length", "turns", "done"])
def test_a_response_that_is_not_graded_has_no_answer(ending: Any) -> None:
    assert extract_answer(make_rules(), end_with(ANSWER, ending=ending)) == ""
    for kind in ("dialogue", "environment"):
        assert extract_answer(make_rules(kind=kind), end_with(ANSWER)) is None
    assert extract_answer(make_rules(graded_text="response"), end_with(ANSWER, ending=ending)) == "4"


class World:
    """An observer with its log, for an evaluation of three answers."""

    def __init__(self, path: Path) -> None:
        self.path, self.seen = path, list[msg.AnyMessage]()
        self.planned = [PlannedAnswer(place, "aime", place, 0, 50 + place) for place in range(3)]
        self.start()

    def start(self) -> None:
        """Replace log and observer, as a new head process does."""
        self.log = AnswerLog(self.path, {"": make_rules()}, SuccessRule(), has_dialogues=True)

        def on_decision(now: float, event: msg.AnyMessage, effects: Sequence[Send]) -> None:
            self.seen.append(event)

        other = cast(Any, SimpleNamespace(quiet=False, on_decision=on_decision))
        self.observer = AnswerObserver(self.log, self.planned, other)
        fields = {"purpose": "evaluate", "ground_truth": "4"}
        groups = (start_group(1, n, group_id=n, problem=f"aime:{n}", seed=50 + n, **fields) for n in range(3))
        self.observer.on_decision(0.0, REQUEST, [Send("rollout-0", group) for group in groups])

    def end(self, *events: msg.TrajectoryFinished | msg.TrajectoryFailed) -> list[AnswerRecord]:
        for event in events:
            self.observer.on_decision(0.0, event, [])
        self.log.close()
        return read_answers(self.path)


def finish_group(group_id: int, reward: float) -> msg.TrajectoryFinished:
    return end_with(ANSWER, trajectory_id=group_id, group_id=group_id, reward=reward)


async def test_a_recovered_head_writes_each_answer_once_and_replaces_failures(tmp_path: Path) -> None:
    world, failure = World(tmp_path / "answers.jsonl"), msg.TrajectoryFailed(1, 1, "engine: gone")
    first = world.end(finish_group(0, 1.0), failure)
    assert [(each.place, each.ending, each.correct) for each in first] == [(0, "answered", True), (1, "failed", False)]
    world.start()
    again = world.end(finish_group(0, 0.0), finish_group(1, 0.0), finish_group(2, 1.0))
    assert {each.ending for each in again} == {"answered"}
    assert [(each.place, each.correct) for each in again] == [(0, True), (1, False), (2, True)]
    assert len(world.path.read_bytes().splitlines()) == 4
    assert [each.seed for each in await world.log.list_answers("sampled", 0)] == [50, 51, 52]
    assert world.seen.count(REQUEST) == 2


async def test_the_calls_after_an_unwritable_answer_raise_its_error(tmp_path: Path) -> None:
    """The token ids of the answer are truncated, so that its text cannot be decoded."""
    world = World(tmp_path / "answers.jsonl")
    broken = finish_group(0, 1.0)
    broken = replace(broken, record=replace(broken.record, token_ids=broken.record.token_ids[:-1]))
    world.observer.on_decision(0.0, broken, [])
    with pytest.raises(ValueError, match="bytes length"):
        await world.log.list_answers("sampled", 0)
    with pytest.raises(ValueError, match="bytes length"):
        world.observer.on_decision(0.0, finish_group(2, 1.0), [])
    world.log.close()


def test_no_answer_follows_a_torn_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first write fails while the second answer waits in the queue."""
    world, both_wait = World(tmp_path / "answers.jsonl"), Event()

    def tear(log: AnswerLog, line: bytes) -> None:
        both_wait.wait()
        with world.path.open("ab") as file:
            file.write(line[:20])
        raise DiskError(world.path, ENOSPC)

    monkeypatch.setattr(AnswerLog, "_write", tear)
    for group in range(2):
        world.observer.on_decision(0.0, finish_group(group, 1.0), [])
    both_wait.set()
    world.log.close()
    assert world.path.stat().st_size == 20


def test_a_line_has_the_answer_the_gold_answer_and_the_dialogue(tmp_path: Path) -> None:
    world = World(tmp_path / "answers.jsonl")
    (found,) = world.end(finish_group(2, 1.0))
    assert (found.set, found.question, found.gold, found.answer, found.seed) == ("aime", "aime:2", "4", "4", 52)
    assert b'"dialogue":[["assistant",' in world.path.read_bytes()
    assert isinstance(found.dialogue, tuple)
    assert AnswerTurn("environment", "42", 2).role == "environment"


def test_a_run_that_resumes_from_a_step_drops_the_answers_of_later_weights(tmp_path: Path) -> None:
    world = World(tmp_path / "answers.jsonl")
    world.end(finish_group(0, 1.0))
    line = world.path.read_bytes()
    world.path.write_bytes(line + line.replace(b'"version":0', b'"version":4') + b'{"torn')
    drop_answers_after(world.path, 3)
    assert world.path.read_bytes() == line
    world.path.write_bytes(line + b"{torn}\n")
    with pytest.raises(UnusableInput, match=r"answers\.jsonl: line 2: "):
        drop_answers_after(world.path, 3)
    drop_answers_after(world.path, 0)
    assert world.path.read_bytes() == b""
