"""Whether a server can serve a run: its version, its model, its room. What does not fit is said by the key to change."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from configs.errors import UnusableInput
from configs.schema import Engine
from configs.sglang import SPARE_TOKENS, Sglang
from engine.checkpoint import load_config
from engine.sglang.protocol import ServerInfo


class ServerUnusable(UnusableInput):
    """The configuration names no server, or none that can serve it; the message begins with the key."""


class Wanted(NamedTuple):
    engine: Engine
    sglang: Sglang
    model: Path  # the run's
    sequence_tokens: int  # of the longest trajectory


def check_fit(info: ServerInfo, wanted: Wanted, server: str) -> None:
    """Raises ServerUnusable with all that does not fit. `server` is what the messages call it."""
    complaints = [*_room(info, wanted, server), *_model(info, wanted, server), *_weights(info, wanted, server)]
    if complaints:
        raise ServerUnusable("\n".join(complaints))


def _room(info: ServerInfo, wanted: Wanted, server: str) -> list[str]:
    need, kv_tokens = wanted.sequence_tokens, wanted.engine.kv_tokens
    has = info.max_total_num_tokens * info.dp_size
    complaints: list[str] = []
    if info.max_req_input_len < need:
        complaints.append(
            f"dialogue.prompt_tokens + response_tokens = {need}: {server} takes no more than {info.max_req_input_len}"
            f" (its --context-length is {info.context_length}, {need + SPARE_TOKENS} is enough)"
        )
    if kv_tokens > has:
        complaints.append(f"engine.kv_tokens = {kv_tokens}: {server} has room for {has}; 0 takes what it has")
    return complaints


def _model(info: ServerInfo, wanted: Wanted, server: str) -> list[str]:
    """The same folder, or a model of the same shape: weights of this run come to it before it generates anything."""
    theirs = Path(info.model_path)
    if theirs.resolve() == wanted.model.resolve():
        return []
    try:
        same = load_config(theirs) == load_config(wanted.model)
    except UnusableInput:  # not to be read from here
        same = False
    return [] if same else [f"model.checkpoint = {wanted.model}: {server} has another model, {theirs}"]


def _weights(info: ServerInfo, wanted: Wanted, server: str) -> list[str]:
    way = wanted.sglang.weights
    if info.dp_size == 1 or way == "disk":
        return []
    return [
        f'sglang.weights = "{way}": {server} has {info.dp_size} copies of the model and takes weights by "disk" alone'
    ]
