"""These checks read data files before a run: only the first rows of a long file, so that the start takes seconds.

The head reads all questions before the first step, and the learner all dialogues.
"""

from collections.abc import Callable, Mapping
from pathlib import Path

from asterism.actors.launch.checks.task_code_checks import CheckedInput
from asterism.configs.errors import UnusableInput
from asterism.configs.run_folder import RunFolder
from asterism.configs.schema.algorithm import SftFileConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.tasks import TaskConfig
from asterism.engine.data.data_files import BadRows, DatasetError, list_data_files
from asterism.engine.data.datasets import QuestionReport, read_problems
from asterism.engine.data.family_dialogues import FamilyDialogues
from asterism.engine.data.sft_dialogues import count_sft_dialogues, describe_bad_rows
from asterism.engine.data.task_inputs import build_family_dialogues, build_task_formats, get_row_layout
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.tools.task_description import TaskDescription
from asterism.sandbox.contract import SandboxFailure
from asterism.tasks.curation.answer_check import find_unreadable_answers, is_answer_of_kind

_MAX_CHECKED_ROWS = 100_000  # limit of checked rows of a file: about a second
_MAX_TOKENIZED_ROWS = 1_000  # limit for a file in the format of a model family
_MAX_CHECKED_ANSWERS = 200  # limit of checked answers, about 5 ms each


def check_data(path: Path, remedy: str, check: Callable[[Path], CheckedInput]) -> CheckedInput:
    try:
        list_data_files(path)
    except DatasetError as error:
        raise UnusableInput(f"{error}; {remedy}") from None
    return check(path)


def check_questions(
    task: TaskConfig, descriptions: Mapping[str, TaskDescription], report: QuestionReport, path: Path
) -> CheckedInput:
    description = descriptions.get(task.name)
    if description is None:
        raise UnusableInput(f"not checked, because {task.key_prefix}import cannot be loaded")
    layout = get_row_layout(task, description)
    answers: dict[str, str] = {}  # names of the problems, by their answer if it is no number
    for problem in read_problems(path, report, _MAX_CHECKED_ROWS, layout):
        if layout.needs_answer and not is_answer_of_kind(problem.ground_truth, "number"):
            answers.setdefault(problem.ground_truth, problem.name)
    warnings = (*report.list_warnings(), *_check_answers(answers))
    num_rows = report.num_rows + len(report.bad_rows.errors)
    return CheckedInput(f"{path}: {report.describe()}{_describe_limit(num_rows, _MAX_CHECKED_ROWS)}", warnings)


def _check_answers(names: Mapping[str, str]) -> list[str]:
    """Return warnings about the answers. `names` has the name of a problem for each answer."""
    checked = list(names)[:_MAX_CHECKED_ANSWERS]
    try:
        unreadable = find_unreadable_answers(checked) if checked else []
    except SandboxFailure as failure:
        return [f"the answers are not checked: {failure}"]
    warnings: list[str] = []
    if unreadable:
        first = f"the first is {unreadable[0]!r:.80} in {names[unreadable[0]]}"
        warnings.append(
            f"the verifier cannot parse {len(unreadable):,} answers, so that their trajectories are masked; {first}"
        )
    if unchecked := len(names) - len(checked):
        warnings.append(
            f"{unchecked:,} further answers that are no numbers are not checked; `asterism data inspect` checks more"
        )
    return warnings


def check_dialogues(
    run: RunConfig, descriptions: Mapping[str, TaskDescription], file: SftFileConfig, path: Path
) -> CheckedInput:
    if missing := next((task for task in run.resolved_tasks if task.name not in descriptions), None):
        raise UnusableInput(f"not checked, because {missing.key_prefix}import cannot be loaded")
    formats, bad_rows = build_task_formats(run, descriptions), BadRows(run.sft.max_bad_rows, "sft.max_bad_rows")
    families = _load_families(run, descriptions)
    limit = _MAX_TOKENIZED_ROWS if families else _MAX_CHECKED_ROWS
    count = count_sft_dialogues(path, formats, limit, file, bad_rows, families)
    unusable = describe_bad_rows(bad_rows.errors)
    return CheckedInput(f"{path}: {count:,} dialogues{_describe_limit(count, limit)}", (unusable,) if unusable else ())


def resolve_checkpoint(run: RunConfig) -> Path | None:
    """Return None if the run itself makes the checkpoint and has not done so yet."""
    folder = RunFolder(Path(run.runs_folder) / run.name).expand_path(run.model.checkpoint)
    return None if run.generates(run.model.checkpoint) and not folder.exists() else folder


def _load_families(run: RunConfig, descriptions: Mapping[str, TaskDescription]) -> Mapping[str, FamilyDialogues]:
    if not any(task.get_dialogue().renderer for task in run.resolved_tasks):
        return {}
    checkpoint = resolve_checkpoint(run)
    if checkpoint is None:  # the tokenizer does not exist either
        return {}
    try:
        return build_family_dialogues(run, descriptions, load_tokenizer(checkpoint))
    except UnusableInput as error:
        raise UnusableInput(
            f"not checked, because model.checkpoint or dialogue.renderer is unusable: {error}"
        ) from None


def _describe_limit(num_rows: int, limit: int) -> str:
    return f" in the first {num_rows:,} rows; the others are checked later" if num_rows >= limit else ""
