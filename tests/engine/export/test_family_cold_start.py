"""Tests: cold-start dialogues with dialogue.renderer have the token ids of a rollout.

test_family_dialogues.py compares the token ids of rollouts with the exported template.
"""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest

from asterism.configs.schema.algorithm import SftConfig
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.configs.schema.run_config import RunConfig
from asterism.engine.data.data_files import BadRows, DatasetError
from asterism.engine.data.sft_dialogues import PLAIN_FILE, TokenizedDialogue, count_sft_dialogues, iter_sft_dialogues
from asterism.engine.data.task_inputs import build_family_dialogues, build_task_formats
from asterism.engine.data.token_files import DialogueSource
from asterism.engine.hf.family_renderer import FamilyRenderer
from asterism.engine.hf.tokenizer import FastTokenizer, load_tokenizer
from asterism.tasks import MATH_PYTHON
from tests.engine.data.public_layouts import PUBLIC_ROWS, SEVERAL_CALLS_ROWS, THOUGHT
from tests.engine.export.family_folders import FAMILY_KINDS, write_family_tokenizer
from tests.engine.export.family_runs import CONFIGS, EMPTY_REASONING, TOOL, make_family_dialogue, make_family_run
from tests.engine.export.random_dialogues import make_text
from tests.engine.hf.test_family_renderer import FAMILIES, HOSTILE, make_tokenizer

NUM_DIALOGUES = 60  # number for each configuration
QUESTION, ANSWER = {"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "It is 2."}
CALL = {"type": "function", "function": {"name": TOOL, "arguments": {"code": "1 + 1"}}}
CALL_TURN = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "2"}
KIMI = [f"<|{text}|>" for text in ("im_user", "im_assistant", "im_system", "im_middle", "im_end", "tool_call_end")]
KIMI += [f"<|tool_call{text}_begin|>" for text in ("s_section", "", "_argument")] + ["<|tool_calls_section_end|>"]


class ColdStart:
    """A reader of rows, as in the cold start of a run with this table [dialogue]."""

    def __init__(self, folder: Path, config: DialogueConfig, tokenizer: FastTokenizer | None = None) -> None:
        kind = FAMILY_KINDS[config.renderer.replace("-", "")] if tokenizer is None else None
        self.tokenizer = tokenizer or load_tokenizer(write_family_tokenizer(folder / "tokenizer", kind))
        run, descriptions = RunConfig(name="r", dialogue=config), {"": MATH_PYTHON}
        self.formats = build_task_formats(run, descriptions)
        self.families = build_family_dialogues(run, descriptions, self.tokenizer)
        self.path = folder / "rows.jsonl"

    def read(self, rows: Sequence[Any], bad_rows: BadRows | None = None) -> list[TokenizedDialogue]:
        self.path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        found = iter_sft_dialogues(self.path, self.tokenizer, self.formats, PLAIN_FILE, bad_rows, self.families)
        dialogues = list(found)
        read_again = count_sft_dialogues(self.path, self.formats, 10**6, PLAIN_FILE, bad_rows, self.families)
        assert len(dialogues) == read_again
        return dialogues

    def read_one(self, *messages: Any) -> TokenizedDialogue:
        (dialogue,) = self.read([{"messages": messages}])
        return dialogue

    def decode_turns(self, dialogue: TokenizedDialogue) -> list[str]:
        """Return the text of each turn that has a loss."""
        pairs = groupby(zip(dialogue.loss_mask, dialogue.token_ids, strict=True), key=lambda pair: pair[0])
        return [self.tokenizer.decode([each for _, each in part]) for is_trained, part in pairs if is_trained]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_a_dialogue_has_the_tokens_of_its_rollout(tmp_path: Path, name: str) -> None:
    """The template adds empty reasoning to a last turn without reasoning."""
    run, cold_start = make_family_run(tmp_path, name), ColdStart(tmp_path, CONFIGS[name])
    num_turns = 0
    for seed in range(NUM_DIALOGUES):
        messages = make_family_dialogue(run, seed, make_text)
        trained, turns = run.train(messages)
        expected, mask, end = [], [], 0
        for turn in turns:
            is_last = turn.place + 1 == len(messages) or messages[turn.place + 1]["role"] == "user"
            has_none = run.thinks and is_last and "reasoning_content" not in messages[turn.place]
            generated = [*(run.encode(EMPTY_REASONING) if has_none else []), *trained[turn.start : turn.end]]
            expected += [*trained[end : turn.start], *generated]
            mask += [*[0] * (turn.start - end), *[1] * len(generated)]
            end = turn.end
        learned = cold_start.read_one(*messages)
        assert (learned.token_ids, learned.loss_mask) == (expected, mask)
        num_turns += len(turns)
    assert num_turns > 2 * NUM_DIALOGUES


@pytest.mark.parametrize("rows", [PUBLIC_ROWS, SEVERAL_CALLS_ROWS])
@pytest.mark.parametrize("thinks", [True, False])
def test_public_layouts_are_read_in_the_format_of_qwen3(tmp_path: Path, rows: dict[str, Any], thinks: bool) -> None:
    """All layouts of a dialogue give the same turns, which follow the row's own system text and tools."""
    has_reasoning = rows is SEVERAL_CALLS_ROWS
    parameters = {"enable_thinking": thinks}
    cold_start = ColdStart(tmp_path, DialogueConfig(renderer="qwen3", renderer_parameters=parameters))
    if has_reasoning and not thinks:
        with pytest.raises(
            DatasetError, match=r"row 1, field `messages\[2\]`: the turn cannot follow .*; remove its reasoning"
        ):
            cold_start.read(list(rows.values()))
        return
    dialogues = cold_start.read(list(rows.values()))
    turns = [cold_start.decode_turns(dialogue) for dialogue in dialogues]
    assert len(turns) == len(rows) and all(each == turns[0] for each in turns)
    assert turns[0][0].startswith(f"<think>\n{THOUGHT.strip()}\n</think>\n\n" if has_reasoning else "<tool_call>\n")
    assert "get_weather" in turns[0][0]
    for dialogue in dialogues:
        text = cold_start.tokenizer.decode(dialogue.token_ids)
        assert text.count("# Tools") == 1 and "You are a weather service." in text and "boxed" not in text
    assert len({tuple(dialogue.token_ids) for dialogue in dialogues}) == 1


def test_public_layouts_are_read_in_the_format_of_llama_3(tmp_path: Path) -> None:
    dialogues = ColdStart(tmp_path, DialogueConfig(renderer="llama-3")).read(list(PUBLIC_ROWS.values()))
    assert len({tuple(dialogue.token_ids) for dialogue in dialogues}) == 1


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        ({**CALL_TURN, "content": "I add."}, r"the format of llama-3 has no place for the text before a call"),
        ({**ANSWER, "reasoning_content": "I add."}, r"the format of llama-3 has no place for the reasoning"),
        ({**CALL_TURN, "tool_calls": [CALL, CALL]}, r"llama-3: .*only supports a single tool call"),
        ({**ANSWER, "content": '<tool_call>{"name": 1}</tool_call>'}, r"content\.name`: unknown function 1"),
        ({**ANSWER, "content": "<tool_call>some</tool_call>"}, r"content`: <tool_call> contains no JSON"),
        ({**ANSWER, "content": "<tool_call>{}</tool_call> It is 2."}, r"content`: a text follows a call"),
        ({**CALL_TURN, "tool_calls": [{"name": TOOL, "arguments": '{"code": "\\udc00"}'}]}, "no Unicode text"),
        (
            {**CALL_TURN, "tool_calls": [{"name": TOOL, "arguments": f'{{"code": {"[" * 900}{"]" * 900}}}'}]},
            "nested too deeply",
        ),
    ],
)
def test_a_turn_that_the_format_cannot_express_makes_its_row_unusable(
    tmp_path: Path, turn: dict[str, Any], problem: str
) -> None:
    bad_rows = BadRows(2, "sft.max_bad_rows")
    cold_start = ColdStart(tmp_path, DialogueConfig(tools=(TOOL,), renderer="llama-3"))
    assert len(cold_start.read([{"messages": [QUESTION, turn]}, {"messages": [QUESTION, ANSWER]}], bad_rows)) == 1
    assert all("row 1" in str(error) for error in bad_rows.errors)
    with pytest.raises(DatasetError, match=rf"row 1.*{problem}"):
        cold_start.read([{"messages": [QUESTION, turn]}])


def make_attacked_row(text: str, *, in_names: bool) -> dict[str, Any]:
    """Make a row with this text in all texts, or in all names, keys and descriptions and in the argument."""
    if in_names:
        properties = {f"a{text}": {"type": "string", "description": text}}
        parameters = {"type": "object", "properties": properties}
        tool = {"name": f"f{text}g", "description": text, "parameters": parameters}
        turn = {**CALL_TURN, "tool_calls": [{"name": f"f{text}g", "arguments": {f"a{text}": text}}]}
        return {"tools": [tool], "messages": [QUESTION, turn, RESULT, ANSWER]}
    turn = {**CALL_TURN, "tool_calls": [{"function": {"name": TOOL, "arguments": {"code": text}}}]}
    user, result = ({"role": role, "content": text} for role in ("user", "tool"))
    return {"messages": [user, turn, result, {"role": "assistant", "content": f"It is {text}."}]}


@pytest.mark.parametrize("in_names", [True, False])
@pytest.mark.parametrize("name", ["qwen3", "llama3"])
def test_texts_and_names_of_a_row_never_become_special_tokens(tmp_path: Path, name: str, in_names: bool) -> None:
    """In prompts and turns, special tokens come only from the format."""
    cold_start = ColdStart(tmp_path, CONFIGS[name])
    special = {*FAMILY_KINDS[name].special, "<tool_call>"} - {"<|endoftext|>"}
    token_ids = set(map(cold_start.tokenizer.find_token_id, special))
    hostile = "".join(FAMILY_KINDS[name].special) + ("" if in_names else HOSTILE)
    rows = [make_attacked_row(text, in_names=in_names) for text in ("text", hostile)]
    ordinary, attacked = (cold_start.read([row])[0] for row in rows)
    specials = [[each for each in dialogue.token_ids if each in token_ids] for dialogue in (ordinary, attacked)]
    assert specials[0] == specials[1]
    assert len(cold_start.decode_turns(attacked)) == 2
    if not in_names:
        assert cold_start.tokenizer.decode(attacked.token_ids).count(HOSTILE.strip()) >= 2


def test_a_turn_without_an_end_token_ends_with_the_role_of_the_next_turn(tmp_path: Path) -> None:
    config = DialogueConfig(tools=(TOOL,), renderer="glm-4.5", renderer_parameters={"enable_thinking": True})
    tokenizer = make_tokenizer(tmp_path, FAMILIES["glm-4.5"])
    cold_start = ColdStart(tmp_path, config, tokenizer)
    thought = {"reasoning_content": "I add."}
    dialogue = cold_start.read_one(QUESTION, {**CALL_TURN, **thought}, RESULT, {**ANSWER, **thought})
    called, answered = cold_start.decode_turns(dialogue)
    assert called.endswith("</tool_call><|observation|>") and answered.endswith("It is 2.<|user|>")
    assert "I add." in called and "I add." in answered
    only_called = cold_start.read_one(QUESTION, {**CALL_TURN, **thought})
    assert cold_start.decode_turns(only_called) == [called]


def test_a_rollout_reads_the_calls_of_the_dialogue(tmp_path: Path) -> None:
    run = make_family_run(tmp_path, "qwen3")
    learned = ColdStart(tmp_path, CONFIGS["qwen3"]).read_one(QUESTION, CALL_TURN, RESULT, ANSWER)
    start = learned.loss_mask.index(1)
    end = learned.loss_mask.index(0, start)
    token_ids = b"".join(each.to_bytes(4, "little") for each in learned.token_ids[:end])
    (call,) = run.renderer.parse_turn(token_ids, start).calls
    assert call.arguments == {"code": "1 + 1"}  # pyright: ignore[reportAttributeAccessIssue]


def test_results_have_the_ids_of_their_calls_in_the_format_of_kimi(tmp_path: Path) -> None:
    """Instead of the name, the format of Kimi renders an id, which ends with the number of the call in the dialogue."""
    tokenizer = make_tokenizer(tmp_path, [*KIMI, "[BOS]", "[EOS]", "<|endoftext|>"])
    cold_start = ColdStart(tmp_path, DialogueConfig(tools=(TOOL,), renderer="kimi-k2"), tokenizer)
    dialogue = cold_start.read_one(QUESTION, CALL_TURN, RESULT, CALL_TURN, RESULT, ANSWER)
    first, second, _ = cold_start.decode_turns(dialogue)
    text = tokenizer.decode(dialogue.token_ids)
    for turn, call_id in ((first, f"functions.{TOOL}:0"), (second, f"functions.{TOOL}:1")):
        assert f"<|tool_call_begin|>{call_id}<|tool_call_argument_begin|>" in turn
        assert f"Return of {call_id}" in text


def test_a_turn_that_a_rollout_reads_differently_is_unusable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cold_start = ColdStart(tmp_path, CONFIGS["qwen3"])
    monkeypatch.setattr(FamilyRenderer, "read_called_names", lambda *_: ["other"])
    with pytest.raises(DatasetError, match=r"messages\[1\]`: a rollout in the format of qwen3 would read other calls"):
        cold_start.read_one(QUESTION, CALL_TURN, RESULT, ANSWER)


@pytest.mark.parametrize("name", ["qwen3", "qwen3 quick", "llama3"])
@pytest.mark.parametrize("blank", ["", " ", "\n\n"])
def test_blank_reasoning_and_blank_texts_before_calls_are_dropped(tmp_path: Path, name: str, blank: str) -> None:
    cold_start = ColdStart(tmp_path, CONFIGS[name])
    plain = cold_start.read_one(QUESTION, CALL_TURN, RESULT, ANSWER)
    thought = {**ANSWER, "content": f"<think>{blank}</think>\n\nIt is 2."}
    assert cold_start.read_one(QUESTION, {**CALL_TURN, "content": blank}, RESULT, thought) == plain


def test_changed_parameters_of_a_renderer_require_another_token_file(tmp_path: Path) -> None:
    digests = set[str]()
    for date in ("01 Feb 2027", "02 Feb 2027"):
        config = DialogueConfig(tools=(TOOL,), renderer="llama-3", renderer_parameters={"date_string": date})
        cold_start = ColdStart(tmp_path, config)
        cold_start.read_one(QUESTION, ANSWER)
        source = DialogueSource(
            cold_start.path, cold_start.tokenizer, cold_start.formats, PLAIN_FILE, SftConfig(), cold_start.families
        )
        digests.add(source.compute_digest())
    assert len(digests) == 2


def test_a_system_text_that_already_describes_the_tools_stays_unchanged(tmp_path: Path) -> None:
    cold_start = ColdStart(tmp_path, DialogueConfig(renderer="qwen3"))
    row = dict(next(iter(PUBLIC_ROWS.values())))
    described = {"role": "system", "content": "Call <tools>\n{}\n</tools>."}
    (dialogue,) = cold_start.read([{**row, "messages": [described, *row["messages"][1:]]}])
    text = cold_start.tokenizer.decode(dialogue.token_ids)
    assert "Call <tools>" in text and "# Tools" not in text
    assert "get_weather" in cold_start.decode_turns(dialogue)[0]
