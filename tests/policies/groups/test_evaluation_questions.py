"""The plan of an evaluation: the sets, the number of answers and the seed of each answer."""

from collections import Counter

from asterism.bus.messages import BufferCursor, EvaluationRequested, RunFailed, RunStarted, StartGroup
from asterism.configs.schema.algorithm import EvaluationConfig, EvaluationSetConfig, Sampling
from asterism.configs.schema.run_config import RunConfig
from asterism.policies.groups.evaluation_questions import EvaluationQuestions, PlannedAnswer
from asterism.policies.groups.group_starter import ProblemSet, TokenizedProblem
from asterism.policies.seeded_random import EVALUATE, mix
from asterism.policies.step_evaluations import EvaluationPlan
from tests.policies.groups.buffers import BufferDriver, list_starts


def sets(*configs: EvaluationSetConfig, every: int = 0, seed: int = 3) -> RunConfig:
    return RunConfig(name="test", seed=seed, evaluation=EvaluationConfig(questions=9, every=every, sets=configs))


def one(name: str, samples: int = 1, questions: int = 0, every: int = 0) -> EvaluationSetConfig:
    return EvaluationSetConfig(name=name, data=f"{name}.jsonl", samples=samples, questions=questions, every=every)


def ask(run: RunConfig, counts: tuple[int, ...], label: str = "end_sampled", version: int = 0) -> list[PlannedAnswer]:
    return EvaluationQuestions(run, counts).list_answers(EvaluationRequested(label, Sampling(), 9, version))


def test_each_question_has_the_number_of_samples_of_its_set() -> None:
    answers = ask(sets(one("aime", samples=2), one("amc", questions=1)), (2, 5))
    assert [(each.problem, each.evaluation_set, each.place, each.sample) for each in answers] == [
        *((0, "aime", 0, 0), (0, "aime", 0, 1), (1, "aime", 1, 0), (1, "aime", 1, 1), (2, "amc", 0, 0))
    ]


def test_a_set_can_have_more_questions_than_the_default() -> None:
    run = sets(one("gsm", questions=20), one("aime"))
    request = EvaluationPlan.from_config(run).build_request("end_greedy", 3)
    answers = EvaluationQuestions(run, (30, 30)).list_answers(request)
    assert Counter(each.evaluation_set for each in answers) == {"gsm": 20, "aime": 9}


def test_the_seed_of_an_answer_does_not_depend_on_other_sets_or_on_the_number_of_samples() -> None:
    alone = ask(sets(one("amc", samples=2)), (3,))
    behind = [each for each in ask(sets(one("aime"), one("amc", samples=4)), (7, 3)) if each.evaluation_set == "amc"]
    seeds = {(each.place, each.sample): each.seed for each in behind}
    assert [each.seed for each in alone] == [seeds[each.place, each.sample] for each in alone]
    assert len({each.seed for each in behind}) == 12
    assert {each.seed for each in ask(sets(one("amc", samples=2), seed=4), (3,))}.isdisjoint(seeds.values())


def test_questions_without_a_named_set_keep_the_seeds_of_earlier_logs() -> None:
    run = RunConfig(name="test", seed=3, evaluation=EvaluationConfig(questions=2))
    assert [each.seed for each in ask(run, (5,))] == [mix(3, EVALUATE, place) for place in range(2)]


def test_a_set_is_evaluated_during_training_at_its_own_interval() -> None:
    run = sets(one("often", every=2), one("default"), every=3)
    asked = {step: {each.evaluation_set for each in ask(run, (1, 1), "step_sampled", step)} for step in (2, 3, 6)}
    assert asked == {2: {"often"}, 3: {"default"}, 6: {"often", "default"}}
    assert {each.evaluation_set for each in ask(run, (1, 1), "start_greedy")} == {"often", "default"}


def test_a_set_without_an_interval_is_evaluated_only_at_start_and_end() -> None:
    run = sets(one("often", every=2), one("never"))
    assert {each.evaluation_set for each in ask(run, (1, 1), "step_sampled", 4)} == {"often"}


def test_a_resumed_evaluation_starts_only_the_missing_answers_with_their_seeds() -> None:
    run = sets(one("aime", samples=3))
    problems = [TokenizedProblem(f"aime:{place}", "1", bytes(8), evaluation_set="aime") for place in range(2)]
    request = EvaluationRequested("sampled", Sampling(), 9, 0)

    def start(*answered: int) -> tuple[BufferDriver, list[StartGroup]]:
        driver = BufferDriver(run, (), ProblemSet.of_one_task(problems))
        driver.decide(RunStarted(0, BufferCursor(), answered=answered))
        return driver, list_starts(driver.decide(request))

    def find_failures(*answered: int) -> list[RunFailed]:
        """Return the messages of a launch in which all answers fail."""
        driver, groups = start(*answered)
        effects = [effect for group in groups for effect in driver.end(group.group_id, rewards=[None])]
        return [effect.message for effect in effects if isinstance(effect.message, RunFailed)]

    assert find_failures()
    assert not find_failures(1)  # an earlier launch produced one answer
    planned = [group.seed for group in start()[1]]
    assert [group.seed for group in start(*planned[1:3], planned[5])[1]] == [planned[0], *planned[3:5]]
