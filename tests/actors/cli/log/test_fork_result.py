"""The output of `asterism log fork` is compared with golden text."""

from msgspec.structs import replace

from asterism.actors.cli.log.fork_result import Branch, ForkResult, show_fork
from asterism.analysis.trajectory_diff import TokenDivergence, TrajectoryComparison, TrajectoryOutcome, TurnText
from tests.actors.cli.golden_text import assert_matches_golden
from tests.consoles import capture

TEXTS = (
    TurnText(0, "", "let me [bold]count[/]"),
    TurnText(1, "<tool_response>\nstdout:\n[4]\n</tool_response>", "it is 4"),
)
ORIGINAL = TrajectoryOutcome(5, 1.0, "answered", 2, 1, 0, 98, TEXTS, (), ())
SAME = TrajectoryComparison(True, 98, None, None)


def fork(*branches: Branch) -> ForkResult:
    return ForkResult("runs/a[b]", 7, 1, "q:1", "4", 1.0, "checkpoints/step_000000", (3,), None, ORIGINAL, branches)


def render(fork: ForkResult) -> str:
    return capture(lambda console: show_fork(fork, console))


def test_identical_branches_are_reported_in_one_line() -> None:
    different_logprobs = Branch(ORIGINAL, replace(SAME, logprob_difference_max=2e-5))
    assert_matches_golden("fork_identical", render(fork(Branch(ORIGINAL, SAME), different_logprobs)))


def test_diverging_branches_are_shown_from_the_fork_on() -> None:
    other = replace(
        ORIGINAL,
        seed=9,
        reward=None,
        ending="infrastructure: [gone]",
        turn_texts=(TEXTS[0], TurnText(1, "", "a" * 200 + "z" * 200)),
    )
    divergences = (TokenDivergence("turn", 1, 4, 54), TokenDivergence("result", 1, 4, 54), None)
    branches = [Branch(other, TrajectoryComparison(False, 50, each, 0.0)) for each in divergences]
    assert_matches_golden("fork_diverging", render(fork(*branches)))


def test_remarks_report_changed_weights_and_greedy_sampling() -> None:
    assert_matches_golden("fork_remarks", render(replace(fork(), turn=0, original_versions=(3, 4), temperature=0.0)))
    assert "(original: version unknown)" in render(replace(fork(), original_versions=()))
