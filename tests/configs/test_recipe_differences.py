"""The page docs/recipe-differences.md agrees with the schema, the preset of the release, and the demo."""

import re
import tomllib
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asterism.configs.load import PRESETS_FOLDER, load_run
from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig, RocConfig, Sampling, SftConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.learner_config import LearnerConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.configs.schema.schema_tree import Section, find_annotation, find_section, get_field_types, is_table_array
from asterism.configs.schema.tasks import RewardConfig

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "recipe-differences.md"
HEADER = ["Key", "Report", "Release", "Default here", "Demo", "Reason"]
NOT_STATED = "not stated"
SECTIONS: dict[str, type[Section]] = {
    **{"dialogue": DialogueConfig, "sampling": Sampling, "sft": SftConfig, "rl": RlConfig, "reward": RewardConfig},
    **{"roc": RocConfig, "learner": LearnerConfig, "evaluation": EvaluationConfig},
}
# These keys do not change the mathematics of training, or neither report nor release has such a key.
OTHER_KEYS = {
    *("dialogue.renderer", "dialogue.renderer_parameters"),  # keys of a model family's own chat format
    *("dialogue.tool_call_format", "learner.optimizer.name"),  # keys with only one value
    *("sft.data", "sft.mixture", "sft.max_bad_rows"),
    *("sft.validation", "sft.validation_share", "sft.validation_every"),  # keys of validation losses
    *("reward.weights", "reward.time_limit_s", "evaluation.success"),  # keys of reward functions
    *("learner.ranks", "learner.threads", "learner.memory.micro_batch_tokens"),  # keys of speed and memory
    *("learner.device", "learner.dtype", "learner.head_dtype", "learner.dp_replicate", "learner.collective_timeout_s"),
    *("learner.memory.activation_checkpointing", "learner.memory.reduce_gradients", "learner.peak_tflops"),
    *("learner.memory.shared_prompts", "learner.memory.offload", "learner.compile", "learner.lora.publish"),
    *("learner.resume_from", "learner.resume_optimizer", "rl.first_problem"),  # keys for runs of several stages
    "learner.loss.mismatch_limit",  # this key can end a run, but changes no update
    *("learner.checkpoints.every", "learner.checkpoints.minutes", "learner.checkpoints.keep"),
    *("learner.checkpoints.export_every", "learner.checkpoints.export_dtype"),
    *("evaluation.questions", "evaluation.during", "evaluation.keep_best", "evaluation.sets", "evaluation.only"),
    *("evaluation.sampling.temperature", "evaluation.sampling.top_p", "evaluation.sampling.top_k"),
}


class Row(msgspec.Struct, frozen=True):
    """The texts of the cells in one row of a table."""

    report: str
    release: str
    default: str
    demo: str
    reason: str


def parse_page(text: str) -> dict[str, Row]:
    """Return the rows by the full path of their key. Raises AssertionError for a table of another form."""
    rows: dict[str, Row] = {}
    section = ""
    for line in text.splitlines():
        if heading := re.fullmatch(r"## \[(\w+)\]", line):
            section = heading[1]
        if not line.startswith("|"):
            continue
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        assert len(cells) == len(HEADER), line
        if cells == HEADER or set("".join(cells)) == {"-"}:
            continue
        key = f"{section}.{cells[0].strip('`')}"
        assert key not in rows, f"{key} has two rows"
        rows[key] = Row(*cells[1:])
    return rows


@cache
def rows() -> dict[str, Row]:
    return parse_page(PAGE.read_text())


def parse_value(key: str, cell: str) -> object:
    """Return the value that begins a cell, converted to the key's type in the schema."""
    code = re.match("`(.+?)`", cell)
    assert code, f"{key}: no value in code: {cell}"
    return msgspec.convert(tomllib.loads(f"value = {code[1]}")["value"], find_annotation(RunConfig, key.split(".")))


def list_keys(table: dict[str, Any], prefix: str = "") -> set[str]:
    keys: set[str] = set()
    for name, value in table.items():
        keys |= list_keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}"}
    return keys


def list_section_keys(section: type[Section], prefix: str) -> set[str]:
    keys: set[str] = set()
    for name, annotation in get_field_types(section).items():
        inner = None if is_table_array(annotation) else find_section(annotation)
        keys |= list_section_keys(inner, f"{prefix}{name}.") if inner else {f"{prefix}{name}"}
    return keys


DEFAULT = load_run(None, ["name=default"])
RELEASE = load_run(None, ["name=release", "preset=rstar2_release"])
DEMO = load_run(ROOT / "configs" / "tiny.toml")
PRESET_KEYS = list_keys(tomllib.loads((PRESETS_FOLDER / "rstar2_release.toml").read_text()))


@pytest.mark.parametrize("key", rows())
class TestRow:
    def test_the_key_exists_and_has_a_reason(self, key: str) -> None:
        assert find_annotation(RunConfig, key.split(".")) is not None
        assert rows()[key].reason.endswith(".")

    def test_the_default_equals_the_default_of_the_schema(self, key: str) -> None:
        assert parse_value(key, rows()[key].default) == attrgetter(key)(DEFAULT)

    def test_a_value_of_the_report_is_the_default(self, key: str) -> None:
        report = rows()[key].report
        assert report != ""
        if report.startswith("`"):
            assert parse_value(key, report) == attrgetter(key)(DEFAULT)

    def test_the_value_of_the_release_equals_the_value_of_the_preset(self, key: str) -> None:
        release = rows()[key].release
        if release == NOT_STATED:
            assert key not in PRESET_KEYS
            assert attrgetter(key)(RELEASE) == attrgetter(key)(DEFAULT)
        else:
            assert parse_value(key, release) == attrgetter(key)(RELEASE)

    def test_the_demo_has_a_value_exactly_where_it_differs_from_the_default(self, key: str) -> None:
        demo, value = rows()[key].demo, attrgetter(key)(DEMO)
        assert (demo != "") == (value != attrgetter(key)(DEFAULT))
        assert demo == "" or parse_value(key, demo) == value


def test_every_key_of_the_preset_has_a_row() -> None:
    assert PRESET_KEYS - set(rows()) == set()


def test_every_key_of_the_algorithm_has_a_row_or_is_in_other_keys() -> None:
    keys = {key for name, section in SECTIONS.items() for key in list_section_keys(section, f"{name}.")}
    assert keys - set(rows()) - OTHER_KEYS == set(), "add a row to docs/recipe-differences.md"
    assert OTHER_KEYS - keys == set()
    assert OTHER_KEYS & set(rows()) == set()


def test_links_of_the_page_name_existing_headings() -> None:
    links = re.findall(r"\]\(([\w-]+\.md)(?:#([\w-]+))?\)", PAGE.read_text())
    assert ("release.md", "") in links
    for page, anchor in links:
        headings = re.findall("^#+ (.+)$", (PAGE.parent / page).read_text(), re.MULTILINE)
        assert anchor in ("", *(re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings))


def test_a_row_with_a_missing_cell_or_a_repeated_key_is_refused() -> None:
    row = "| `lr` | `1` | `1` | `1` | | Why. |\n"
    assert parse_page(f"## [rl]\n{row}") == {"rl.lr": Row("`1`", "`1`", "`1`", "", "Why.")}
    for text in (f"## [rl]\n{row}{row}", "| `lr` | `1` |\n"):
        with pytest.raises(AssertionError, match="lr"):
            parse_page(text)
