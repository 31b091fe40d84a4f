"""Builds the tokenizer of an exported model: it encodes a rendered chat template to the token ids of the run.

The run encodes a dialogue piece by piece, and untrusted text without special tokens. The chat template has marks of two
private characters each, which the exported tokenizer removes:

    BOUNDARY    ends a piece: the pre-tokenizer splits there, so that no merge crosses it
    HIDDEN      keeps the text of a special token ordinary: the normalizer, which runs after special tokens are found,
                removes this mark

Texts without marks have the same ids as before, and the vocabulary does not change.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from asterism.engine.hf.tokenizer import FastTokenizer
from asterism.engine.hf.weight_files import read_json_object
from asterism.policies.dialogue.chat_template import TemplateMarks

BOUNDARY, HIDDEN = "\ue0f0\ue0f2", "\ue0f0\ue0f1"
BOUNDARY_LITERAL = json.dumps(BOUNDARY)  # BOUNDARY as a literal of a chat template
_DEFAULT_CONFIG: Mapping[str, Any] = {"clean_up_tokenization_spaces": False}
# A class that loads tokenizer.json as it is; classes such as Qwen2Tokenizer build another tokenizer.
_CLASS = "PreTrainedTokenizerFast"
# For these architectures transformers 5 ignores `tokenizer_class` and loads Qwen2Tokenizer, unless the folder has its
# own class. It imports that class only with `trust_remote_code`; otherwise it loads tokenizer.json.
_REPLACED_TYPES = ("qwen2",)
CLASS_FILE = "tokenization_asterism.py"
CLASS_CODE = """\
from transformers import PreTrainedTokenizerFast


class AsterismTokenizer(PreTrainedTokenizerFast):
    \"""Loads tokenizer.json as it is.\"""
"""

TokenizerFields = Mapping[str, Any]  # content of tokenizer.json


def find_marks(tokenizer: FastTokenizer, fields: TokenizerFields) -> TemplateMarks:
    """Return the marks for chat templates. `fields`: content of tokenizer.json."""
    added = {token["id"]: token for token in fields.get("added_tokens", ())}
    whole = {token_id for token_id, token in added.items() if not (token["lstrip"] or token["rstrip"])}

    def between(before: str, after: str) -> str:
        """Return BOUNDARY, or no mark next to an added token, at which every tokenizer splits the text."""
        ends = tokenizer.encode(before, trusted=True)[-1:] + tokenizer.encode(after, trusted=True)[:1]
        return "" if whole & set(ends) else BOUNDARY

    return TemplateMarks(between, _list_hidden(added.values()))


def _list_hidden(added: Any) -> list[tuple[str, str]]:
    """Map the shortest start of each special text, which no ordinary added text contains, to a start with HIDDEN."""
    special = [token["content"] for token in added if _is_protected(token)]
    ordinary = [token["content"] for token in added if not _is_protected(token)]
    starts: dict[str, str] = {}
    for text in special:
        sizes = range(1, len(text) + 1)
        start = next((text[:size] for size in sizes if not any(text[:size] in other for other in ordinary)), text)
        starts[start] = start[0] + HIDDEN + start[1:]
    return list(starts.items())


def _is_protected(token: Mapping[str, Any]) -> bool:
    """Return whether asterism.engine.hf.tokenizer marks this token as special in untrusted text."""
    return token["special"] or _is_tag(token["content"])


def _is_tag(text: str) -> bool:
    return text.startswith("<") and text.endswith(">")


def build_served_tokenizer(fields: TokenizerFields, visible: Sequence[str], *, has_boundaries: bool) -> dict[str, Any]:
    """Return `fields` with steps that remove marks. `visible`: tags that decoding without special tokens keeps, because
    a client parses these tags. A second call changes nothing."""
    served: dict[str, Any] = json.loads(json.dumps(fields))
    for token in served.get("added_tokens", ()):
        if _is_protected(token):
            token["normalized"] = False  # the token is found before the normalizer removes HIDDEN
        if token["content"] in visible and _is_tag(token["content"]):
            token["special"] = False
    hidden = {"type": "Replace", "pattern": {"String": HIDDEN}, "content": ""}
    served["normalizer"] = _prepend(hidden, served.get("normalizer"), "normalizers")
    if has_boundaries:
        boundary = {"type": "Split", "pattern": {"String": BOUNDARY}, "behavior": "Removed", "invert": False}
        served["pre_tokenizer"] = _prepend(boundary, served.get("pre_tokenizer"), "pretokenizers")
    return served


def _prepend(step: Mapping[str, Any], present: Mapping[str, Any] | None, key: str) -> dict[str, Any]:
    """Return a sequence that begins with `step`."""
    steps = [] if present is None else present[key] if present["type"] == "Sequence" else [present]
    return {"type": "Sequence", key: [step, *(each for each in steps if each != step)]}


def build_tokenizer_config(source: Path, model_type: str, visible: Sequence[str], stop_token: str) -> dict[str, Any]:
    """Return the content of tokenizer_config.json in `source`, without its chat template."""
    path = source / "tokenizer_config.json"
    fields: dict[str, Any] = read_json_object(path) if path.exists() else dict(_DEFAULT_CONFIG)
    for token in (fields.get("added_tokens_decoder") or {}).values():
        if token["special"] or _is_tag(token["content"]):
            token["normalized"] = False
        if token["content"] in visible and _is_tag(token["content"]):
            token["special"] = False
    fields.pop("chat_template", None)
    for name in ("additional_special_tokens", "extra_special_tokens"):
        if isinstance(listed := fields.get(name), list):
            fields[name] = [token for token in listed if token not in visible]
    fields |= {"tokenizer_class": _CLASS, "eos_token": stop_token}
    if model_type in _REPLACED_TYPES:
        fields["auto_map"] = {"AutoTokenizer": [f"{Path(CLASS_FILE).stem}.AsterismTokenizer", None]}
    return fields
