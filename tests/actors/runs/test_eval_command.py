"""`asterism eval` runs over real processes; its figures equal a count from the event log, also after kills."""

import hashlib
import json
import re
import signal
from array import array
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from itertools import combinations
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer

from asterism.analysis.evaluation.answer_records import read_answers
from asterism.bus.messages import StartGroup, TokenRecord, TrajectoryFinished
from asterism.configs.run_folder import RunFolder
from tests.actors.cli.invoking import read_output, read_refusal
from tests.actors.runs.running import ASTERISM, asterism_output, finish, read_messages, start_command, wait_until

pytestmark = pytest.mark.slow

SAMPLES, QUESTIONS = 4, 16


def get_questions(trained: RunFolder) -> Path:
    return trained.path.parent / "aime.jsonl"


def list_arguments(trained: RunFolder, name: str, *flags: str) -> list[str]:
    # Without "strict", printed memory addresses vary the answers. With few sequences, answers end one by one.
    settings = (f"aime={get_questions(trained)}", "determinism=strict", "engine.max_running=6")
    overrides = (flag for setting in settings for flag in ("--set", setting))
    return ["eval", str(trained.path), *overrides, "-k", str(SAMPLES), "--name", name, *flags]


@pytest.fixture(scope="module")
def evaluation(finished: RunFolder) -> tuple[RunFolder, str]:
    """Return an uninterrupted evaluation and its output. The first question has a level."""
    rows = [json.loads(line) for line in (finished.data / "test.jsonl").read_text().splitlines()]
    rows[0]["level"] = 2
    get_questions(finished).write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = asterism_output(*list_arguments(finished, "whole"))
    return RunFolder(finished.path.parent / "whole"), printed


def read_results(folder: RunFolder) -> dict[str, Any]:
    """Return the results without names and durations."""
    results = json.loads(folder.results.read_text())
    aime = results["sets"]["aime"]
    del results["name"], results["results"][0]["time_seconds"], aime["seconds"]
    for level in aime["by_difficulty"].values():
        del level["seconds"]
    return results


class LoggedAnswer(NamedTuple):
    finished: TrajectoryFinished
    text: str  # text in the last box of the last turn, of its last answer block if there is one; "" without a box


def read_logged_answers(folder: RunFolder) -> dict[str, list[LoggedAnswer]]:
    """Return the answers by question, from the event logs alone."""
    questions = {group.group_id: group.problem for group in read_messages(folder, "rollout-0", StartGroup)}
    checkpoint = Path(json.loads(folder.results.read_text())["weights"]["folder"])
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    answers: dict[str, list[LoggedAnswer]] = {}
    for message in read_messages(folder, "head", TrajectoryFinished):
        answers.setdefault(questions[message.group_id], []).append(
            LoggedAnswer(message, read_answer_text(message.record, tokenizer))
        )
    return answers


def read_answer_text(record: TokenRecord, tokenizer: Tokenizer) -> str:
    ids = array("i", record.token_ids).tolist()[record.prompt_tokens :]
    turn = tokenizer.decode(ids, skip_special_tokens=False).rpartition("<|im_start|>assistant\n")[2]
    blocks = re.findall("<answer>(.*?)</answer>", turn, re.DOTALL)
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", blocks[-1] if blocks else turn)
    return boxes[-1] if boxes else ""


def count_majority(answers: list[LoggedAnswer]) -> float:
    """Compute the majority score: correct answers are one choice; a tie scores the share of correct choices."""
    votes = Counter("correct" if each.finished.reward else each.text.replace(" ", "") for each in answers if each.text)
    first = [choice for choice, count in votes.items() if count == max(votes.values())]
    return first.count("correct") / len(first) if first else 0.0


def test_the_accuracies_equal_a_count_from_the_event_log(evaluation: tuple[RunFolder, str]) -> None:
    folder, printed = evaluation
    answers, (result,) = read_logged_answers(folder), json.loads(folder.results.read_text())["sets"].values()
    assert sorted(map(len, answers.values())) == [SAMPLES] * QUESTIONS
    rewards = [[each.finished.reward for each in of_question] for of_question in answers.values()]
    assert result["avg"] == pytest.approx(sum(map(sum, rewards)) / SAMPLES / QUESTIONS)
    for k in (1, 2, 4):
        solved = [any(choice) for each in rewards for choice in combinations(each, k)]
        assert result["pass_at_k"][str(k)] == pytest.approx(sum(solved) / len(solved))
    assert result["majority"] == pytest.approx(sum(map(count_majority, answers.values())) / QUESTIONS)
    assert f"{result['avg']:.1%}" in printed
    (line,) = [json.loads(text) for text in folder.metrics.read_text().splitlines()]
    assert line["set aime: avg@4"] == result["avg"]


def test_lengths_and_calls_equal_a_count_from_the_event_log(evaluation: tuple[RunFolder, str]) -> None:
    folder, _ = evaluation
    (result,) = json.loads(folder.results.read_text())["sets"].values()
    answers = [each for of_question in read_logged_answers(folder).values() for each in of_question]
    finished = [each.finished for each in answers]
    lengths = sorted(len(each.record.token_ids) // 4 - each.record.prompt_tokens for each in finished)
    assert result["response_tokens"]["mean"] == pytest.approx(sum(lengths) / len(lengths))
    assert result["response_tokens"]["median"] == pytest.approx(median(lengths))
    assert result["response_tokens"]["max"] == lengths[-1]
    assert result["endings"] == Counter(each.ending for each in finished)
    assert result["truncated_share"] == pytest.approx(mean(each.ending == "length" for each in finished))
    assert result["unanswered_share"] == pytest.approx(mean(not each.text for each in answers))
    assert result["turns"] == pytest.approx(mean(each.turns for each in finished))
    assert result["calls"] == pytest.approx(mean(each.calls for each in finished))
    failed = sum(each.calls_failed for each in finished)
    assert result["call_error_share"] == pytest.approx(failed / sum(each.calls for each in finished))


def test_the_results_contain_the_settings_that_their_figures_depend_on(
    evaluation: tuple[RunFolder, str], finished: RunFolder
) -> None:
    results = json.loads(evaluation[0].results.read_text())
    questions = get_questions(finished)
    limits = {"prompt_tokens": 32, "response_tokens": 160, "max_turns": 4}
    assert results["limits"] | limits == results["limits"] == results["sets"]["aime"]["limits"]
    assert results["tools"] == results["sets"]["aime"]["tools"] == ["jupyter_code"]
    assert results["sampling"].items() >= {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "seed": 0}.items()
    assert results["sets"]["aime"]["data_sha256"] == hashlib.sha256(questions.read_bytes()).hexdigest()
    assert results["sets"]["aime"]["by_difficulty"]["2"]["questions"] == 1
    assert results["verifier"]["version"] == version("math-verify")
    weights = Path(results["weights"]["folder"]) / "model.safetensors"
    assert results["weights"]["sha256"] == hashlib.sha256(weights.read_bytes()).hexdigest()


def test_other_tools_find_every_answer_with_its_dialogue(evaluation: tuple[RunFolder, str]) -> None:
    folder, _ = evaluation
    questions = [json.loads(line) for line in (folder.path / "questions.jsonl").read_text().splitlines()]
    traces = [json.loads(line) for line in (folder.path / "traces.jsonl").read_text().splitlines()]
    assert [len(each["answers"]) for each in questions] == [SAMPLES] * QUESTIONS
    by_seed = {answer["seed"]: (each, answer) for each in questions for answer in each["answers"]}
    assert {trace["info"]["seed"] for trace in traces} == by_seed.keys()
    for trace in traces:
        question, answer = by_seed[trace["info"]["seed"]]
        assert trace["task"]["data"]["prompt"] == question["text"]
        assert trace["rewards"]["reward"]["score"] == answer["reward"]
        assert answer["answer"] in trace["nodes"][-1]["message"]["content"]
        cut_turns = sum(node["sampled"] for node in trace["nodes"]) - answer["turns"]
        assert cut_turns in ((0, 1) if answer["ending"] == "length" else (0,))


def test_questions_can_be_filtered_by_the_traces_of_their_evaluation(
    evaluation: tuple[RunFolder, str], finished: RunFolder, tmp_path: Path
) -> None:
    """Each kept question has as many correct answers in questions.jsonl as the condition demands."""
    folder, data = evaluation[0], get_questions(finished)
    arguments = ["--by", str(folder.path), "--keep", "solved == rollouts", "--unvisited", "drop"]
    command = ("data", "filter", data, *arguments, "--out", tmp_path / "easy.jsonl")
    questions = [json.loads(line) for line in (folder.path / "questions.jsonl").read_text().splitlines()]
    solved = [each["text"] for each in questions if all(answer["correct"] for answer in each["answers"])]
    if not solved:
        assert "meets the condition; nothing would be written" in read_refusal(*command)
        return
    read_output(*command)
    kept = [json.loads(line)["question"] for line in (tmp_path / "easy.jsonl").read_text().splitlines()]
    assert sorted(kept) == sorted(solved)


@pytest.mark.nightly
def test_an_evaluation_killed_at_five_points_and_resumed_gives_the_same_figures(
    evaluation: tuple[RunFolder, str], finished: RunFolder
) -> None:
    whole, _ = evaluation
    folder = RunFolder(whole.path.parent / "killed")
    points: list[tuple[signal.Signals, Callable[[], bool]]] = [
        (signal.SIGKILL, folder.config.exists),
        *((number, lambda count=count: len(read_answers(folder.answers)) >= count) for number, count in (
            (signal.SIGKILL, 1), (signal.SIGINT, 12), (signal.SIGKILL, 30), (signal.SIGKILL, 55)
        )),
    ]  # fmt: skip
    for number, is_reached in points:
        options = ["--resume"] if folder.path.exists() else []
        with start_command([*ASTERISM, *list_arguments(finished, "killed", *options)]) as process:
            wait_until(is_reached, process)
            process.send_signal(number)
            output = finish(process)
        assert process.returncode == (130 if number == signal.SIGINT else -number), output
        before = read_answers(folder.answers)
        assert len(before) < SAMPLES * QUESTIONS
        if before and number == signal.SIGKILL:  # only a killed evaluation can leave a torn line
            with folder.answers.open("ab") as file:
                file.write(b'{"label":"sampled","ver')  # torn line
    asterism_output(*list_arguments(finished, "killed", "--resume"))
    assert read_results(folder) == read_results(whole)
    found, expected = read_answers(folder.answers), read_answers(whole.answers)
    assert [(each.key, each.digest) for each in found] == [(each.key, each.digest) for each in expected]
    assert json.loads(folder.metrics.read_text()) == json.loads(whole.metrics.read_text())


def test_a_finished_evaluation_prints_its_results_again_without_a_process(
    evaluation: tuple[RunFolder, str], finished: RunFolder
) -> None:
    folder, printed = evaluation
    launches = folder.launch_counter.read_text()
    again = asterism_output(*list_arguments(finished, "whole", "--resume"))
    assert "all questions are answered" in again
    assert again.partition("questions x answers")[2] == printed.partition("questions x answers")[2]
    assert folder.launch_counter.read_text() == launches


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--temperature", "0.5"), "evaluation.sampling.temperature"),
        (("-k", "8"), "evaluation.sets.aime.samples"),
        (("--set", "dialogue.max_turns=2"), "dialogue.max_turns"),
    ],
)
def test_a_resume_with_other_settings_is_refused_with_their_keys(
    evaluation: tuple[RunFolder, str], finished: RunFolder, flags: tuple[str, ...], message: str
) -> None:
    assert message in read_refusal(*list_arguments(finished, "whole", "--resume", *flags))


def test_a_resume_with_other_questions_in_the_same_file_is_refused(
    evaluation: tuple[RunFolder, str], finished: RunFolder
) -> None:
    file = get_questions(finished)
    before = file.read_text()
    file.write_text(before.replace('"level": 2', '"level": 3'))
    output = asterism_output(*list_arguments(finished, "whole", "--resume"), code=2)
    file.write_text(before)
    assert "evaluation.sets.aime.data" in output
