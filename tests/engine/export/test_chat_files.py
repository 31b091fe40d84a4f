"""Tests: the exported chat template and the exported tokenizer give the token ids of the run."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from asterism.configs.schema.algorithm import EvaluationConfig, RlConfig, Sampling
from asterism.configs.schema.dialogue import DialogueConfig
from asterism.engine.hf.tokenizer import load_tokenizer
from asterism.policies.tools.python_tools import TOOL_SCHEMAS
from tests.engine.export.exported_chats import (
    DIALOGUES,
    assert_same_ids,
    build_chat,
    export,
    export_chat,
    render,
    tokenize_rows,
)
from tests.engine.export.family_folders import FAMILIES, FAMILY_KINDS, TEXTS, write_family_tokenizer
from tests.engine.export.random_dialogues import RandomDialogue, make_dialogue

NUM_DIALOGUES = 60  # number for each format; 240 for each family
slow = pytest.mark.slow


def draw_dialogues(config: str) -> list[RandomDialogue]:
    """Draw dialogues; each format has its own seeds. If the run has no tools, every second request has tools."""
    options, first = DIALOGUES[config], NUM_DIALOGUES * list(DIALOGUES).index(config)
    start = "" if options.prefill in ("<reason>", "<think>\n", "") else options.prefill
    run_has_tools = bool(options.tools)
    return [
        make_dialogue(seed, run_has_tools=run_has_tools, has_tools=run_has_tools or seed % 2 == 0, start=start)
        for seed in range(first, first + NUM_DIALOGUES)
    ]


def test_the_random_dialogues_contain_enough_tools_calls_and_results() -> None:
    with_tools: list[RandomDialogue] = []
    without: list[RandomDialogue] = []
    for config, options in DIALOGUES.items():
        for each in draw_dialogues(config):
            (with_tools if options.tools or each.tools else without).append(each)
    assert (len(with_tools), len(without)) == (210, 30)
    assert len({json.dumps(each.messages) for each in with_tools + without}) == 240  # no seed occurs twice
    num_calls = [[len(message.get("tool_calls", ())) for message in each.messages] for each in with_tools + without]
    num_results = [sum(message["role"] == "tool" for message in each.messages) for each in with_tools + without]
    assert num_results == [sum(each) for each in num_calls]
    assert sum(each > 0 for each in num_results[:210]) == 170
    assert sum(max(each) > 1 for each in num_calls) == 124  # a message has several calls
    assert sum(num_results[210:]) == 0


@slow
@pytest.mark.parametrize("config", DIALOGUES)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_template_renders_the_token_ids_of_the_run(tmp_path: Path, family: str, config: str) -> None:
    """Rows of the cold start contain system texts and tools in their columns, as in public data sets."""
    kind, options = FAMILY_KINDS[family], DIALOGUES[config]
    exported = export_chat(tmp_path / "exported", kind, options)
    drawn = draw_dialogues(config)
    rows = [{"system": each.system, "tools": list_schemas(each), "messages": each.messages} for each in drawn]
    for each, learned in zip(drawn, tokenize_rows(tmp_path, kind, options, rows), strict=True):
        system = [{"role": "system", "content": each.system}] if each.system else []
        assert_same_ids(exported, [*system, *each.messages], list_schemas(each) or None, learned)


def list_schemas(drawn: RandomDialogue) -> list[Any]:
    return [json.loads(tool.to_json()) for tool in drawn.tools]


@pytest.fixture
def qwen(tmp_path: Path) -> Any:
    return export_chat(tmp_path / "exported", FAMILY_KINDS["qwen3"], DialogueConfig())


def test_tools_with_additional_default_keys_give_the_prompt_of_the_run(qwen: Any) -> None:
    """The tools have the keys with default values that SGLang adds to a request."""
    messages = [{"role": "user", "content": "1 + 1?"}]
    layouts = [{"type": "function", "function": {**tool._asdict(), "strict": False}} for tool in TOOL_SCHEMAS.values()]
    assert render(qwen, messages, layouts) == render(qwen, messages)
    assert render(qwen, messages, [tool._asdict() for tool in TOOL_SCHEMAS.values()]) == render(qwen, messages)


def test_a_served_turn_continues_the_prefill(qwen: Any) -> None:
    """A response does not repeat the prefill, and its calls are in a separate field."""
    user = {"role": "user", "content": "6 * 7?"}
    call = {"name": "jupyter_code", "arguments": {"code": "6 * 7"}}
    generated = (
        'I compute.</reason>\n<tool_call>\n{"name": "jupyter_code", "arguments": {"code": "6 * 7"}}\n</tool_call>'
    )
    prompt = render(qwen, [user], add_generation_prompt=True)
    served = {"role": "assistant", "content": "I compute.</reason>", "tool_calls": [{"function": call}]}
    assert render(qwen, [user, served]) == [*prompt, *qwen.encode(f"{generated}<|im_end|>")]


def test_special_tokens_in_texts_of_users_and_tools_stay_text(qwen: Any) -> None:
    user = {"role": "user", "content": "<|im_end|><tool_call></think>"}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"name": "jupyter_code", "arguments": {}}]}
    token_ids = render(qwen, [user, answer, {"role": "tool", "content": "<|im_start|></tool_response>"}])
    counts = {text: token_ids.count(qwen.convert_tokens_to_ids(text)) for text in ("<|im_end|>", "</tool_response>")}
    assert counts == {"<|im_end|>": 4, "</tool_response>": 1}  # system, user, assistant, results
    text = qwen.decode(token_ids)
    assert "<|im_end|><tool_call></think>" in text and "<|im_start|></tool_response>" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_the_exported_tokenizer_encodes_texts_like_the_original(tmp_path: Path, family: str) -> None:
    kind = FAMILY_KINDS[family]
    original = load_tokenizer(write_family_tokenizer(tmp_path / "original", kind))
    exported = export_chat(tmp_path / "exported", kind, DialogueConfig())
    for text in (*TEXTS, "e\u0301 <|im_end|> <tool_call>\n12345", "\ue0f0 \ue0f1"):
        assert exported.encode(text, add_special_tokens=False) == original.encode(text, trusted=True)
    assert len(exported) == original.vocab_size


def test_a_second_export_gives_the_same_files(tmp_path: Path) -> None:
    export_chat(tmp_path, FAMILY_KINDS["qwen2.5"], DialogueConfig())
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    export(tmp_path, build_chat(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_the_generation_config_has_the_sampling_of_evaluations_and_the_stop_tokens_of_the_run(tmp_path: Path) -> None:
    config = DialogueConfig(stop_tokens=("<|im_end|>", "<|endoftext|>"))
    tokenizer = export_chat(tmp_path, FAMILY_KINDS["qwen3"], config)
    generation = GenerationConfig.from_pretrained(tmp_path)
    stops = tokenizer.convert_tokens_to_ids(list(config.stop_tokens))
    assert (generation.eos_token_id, generation.do_sample, generation.temperature) == (stops, True, 1.0)
    assert (generation.top_k, generation.max_new_tokens) == (len(tokenizer), config.response_tokens)
    assert tokenizer.eos_token == "<|im_end|>"
    options: dict[str, Any] = {"sampling": Sampling(temperature=0.0), "rl": RlConfig(steps=0)}
    greedy = build_chat(tmp_path, **options).generation
    served = build_chat(tmp_path, **options, evaluation=EvaluationConfig(0, response_tokens=9000))
    assert (served.generation["max_new_tokens"], served.facts.context_tokens) == (9000, 1024 + 9000)
    assert (greedy["do_sample"], greedy["temperature"]) == (False, 0.0)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == stops
