"""What goes over the wire to and from an SGLang server, and which of its versions are known here.

Unknown fields of an answer are ignored; a missing or ill-typed one is an answer of a version that is not known.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from engine.sglang.errors import UnknownAnswer

SUPPORTED = ("0.5.23",)

Answer = TypeVar("Answer")


# ---------------------------------------------------------------- requests


class SamplingParams(msgspec.Struct, frozen=True):
    """All are sent: what is missing would be as the server's --preferred-sampling-params have it."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1  # all
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False  # it makes the server ignore stop_token_ids too
    sampling_seed: int | None = None  # a signed 64-bit number; counts with --enable-deterministic-inference alone
    stream_interval: int | None = None  # tokens from one answer of a stream to the next
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0


class GenerateRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    rid: str
    input_ids: list[int]
    sampling_params: SamplingParams
    return_logprob: bool = False
    logprob_start_len: int = 0  # -1: of new tokens alone; 0 bypasses the prefix cache
    stream: bool = False
    extra_key: str | None = None  # prefixes are found among those of the same key alone
    priority: int | None = None  # larger first, with --enable-priority-scheduling
    routed_dp_rank: int | None = None


# ---------------------------------------------------------------- answers


class Finished(msgspec.Struct, frozen=True, tag_field="type", tag="length"):
    """As many tokens as were asked for, or as the server has room for."""


class Stopped(msgspec.Struct, frozen=True, tag_field="type", tag="stop"):
    matched: int | str | None = None


class Aborted(msgspec.Struct, frozen=True, tag_field="type", tag="abort"):
    message: str = ""
    status_code: int | None = None  # None: by a request to abort


FinishReason = Finished | Stopped | Aborted


class VersionSpan(msgspec.Struct, frozen=True):
    version: str
    start: int
    end: int


class MetaInfo(msgspec.Struct, frozen=True):
    """What is UNSET is missing where a request was aborted before it began, and there alone."""

    id: str
    completion_tokens: int  # so far
    weight_version: str
    output_token_logprobs: list[tuple[float | None, int, str | None]]  # of `output_ids`: all so far, or the new ones
    finish_reason: FinishReason | None = None  # None: more will come
    weight_versions: list[VersionSpan] = []  # of all tokens so far
    prompt_tokens: int | UnsetType = UNSET
    cached_tokens: int | UnsetType = UNSET
    num_retractions: int | UnsetType = UNSET
    dp_rank: int | None = None


class GenerateAnswer(msgspec.Struct, frozen=True):
    output_ids: list[int]
    meta_info: MetaInfo


class ServerInfo(msgspec.Struct, frozen=True):
    version: str
    model_path: str
    max_total_num_tokens: int  # of each rank
    max_req_input_len: int  # a prompt is shorter
    context_length: int | None
    page_size: int
    dp_size: int
    tp_size: int
    device: str
    enable_deterministic_inference: bool
    enable_priority_scheduling: bool
    incremental_streaming_output: bool
    disable_radix_cache: bool


class ModelInfo(msgspec.Struct, frozen=True):
    model_path: str
    weight_version: str


class Queues(msgspec.Struct, frozen=True):
    waiting: int
    paused: int
    retracted: int


class RankLoad(msgspec.Struct, frozen=True):
    """A snapshot, up to some steps old."""

    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_used_tokens: int  # of running requests; what is merely cached is not among them
    max_total_num_tokens: int
    decode_moments: list[float] | None  # [0]: decode steps since the start, those next to a prefill left out
    queues: Queues | None = None


class Loads(msgspec.Struct, frozen=True):
    version: str
    loads: list[RankLoad]


class Done(msgspec.Struct, frozen=True):
    success: bool
    message: str = ""


class RankPlace(msgspec.Struct, frozen=True):
    tp_rank: int
    pp_rank: int


class RankChecksums(msgspec.Struct, frozen=True):
    checksums: Mapping[str, str]  # by parameter, as the server has fused them
    per_gpu_checksum: str  # of all of them
    parallelism_info: list[RankPlace]  # [0] is the model's, further ones are drafts'

    @property
    def part(self) -> tuple[int, int]:
        """Ranks of one part hold the same of the model."""
        return self.parallelism_info[0].tp_rank, self.parallelism_info[0].pp_rank


class Checksums(msgspec.Struct, frozen=True):
    ranks: list[RankChecksums]


class _Versioned(msgspec.Struct):
    version: str = ""


class _Cause(msgspec.Struct):
    message: str = ""
    code: int | None = None


class _Error(msgspec.Struct):
    """SGLang's three ways to say what is wrong: {"error": {...}}, {"error": "..."} and {"message": ...}."""

    error: _Cause | str | None = None
    message: str = ""


def decode(content: bytes | bytearray, kind: type[Answer], version: str = "") -> Answer:
    """Raises UnknownAnswer, which names the field, and the server's version as far as it is known."""
    try:
        return msgspec.json.decode(content, type=kind)
    except msgspec.DecodeError as error:
        raise UnknownAnswer(f"SGLang {version or _version_in(content)} gave no {kind.__name__}: {error}") from error


def check_version(version: str) -> None:
    if version not in SUPPORTED:
        raise UnknownAnswer(f"SGLang {version} is not known here; known: {', '.join(SUPPORTED)}")


def error_in(content: bytes | bytearray) -> tuple[int | None, str] | None:
    """The status, if it says one, and what the server says is wrong; None where it says nothing of the kind."""
    try:
        said = msgspec.json.decode(content, type=_Error)
    except msgspec.DecodeError:
        return None
    match said.error:
        case _Cause(message=message, code=code):
            return code, message
        case str(message):
            return None, message
        case None:
            return (None, said.message) if said.message else None


def _version_in(content: bytes | bytearray) -> str:
    try:
        return msgspec.json.decode(content, type=_Versioned).version or "(version unknown)"
    except msgspec.DecodeError:
        return "(version unknown)"
