"""Converts a GGUF file into a transformers folder, through the readers of transformers and of the package gguf.

Quantized weights become floats; the folder has the rounding of the file. `origin.json` names the file, its digest and
its licence; checkpoints and exports of a run keep a copy.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.pre_tokenizers import ByteLevel, Digits
from torch import Tensor

from asterism.configs.errors import UnusableInput
from asterism.configs.file_manifest import check_file
from asterism.engine.export.hf_export import save_model
from asterism.engine.export.origin import LICENSE_FILE, ORIGIN_FILE, Origin
from asterism.engine.hf.architectures import find_problem
from asterism.engine.hf.model_config import DecoderConfig, UnsupportedModel, check_shape

if TYPE_CHECKING:
    from gguf import GGUFReader

_MAGIC = b"GGUF"
_MODEL_TYPES = {"qwen3moe": "qwen3_moe"}  # names of architectures in GGUF files that differ from transformers' names
_REQUIRED_FIELDS = {"tokenizer.ggml.tokens": "no tokenizer", "tokenizer.ggml.merges": "a tokenizer without merges"}
# tensors and fields that change the rotary embedding, and that transformers' reader ignores
_ROPE_TENSOR, _ROPE_FIELD = "rope_freqs.weight", "rope.scaling.type"
_SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")
# llama.cpp's names of splits. transformers' reader uses GPT-2's split for every name that it does not know.
_SPLIT_FIELD = "tokenizer.ggml.pre"
_GPT2_SPLITS = ("gpt-2", "mpt", "olmo", "jais")
_DIGIT_SPLITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # each digit apart, then GPT-2's split


class GgufSource(NamedTuple):
    file: Path
    license_file: Path | None  # text of the model's licence; None: none
    source: str  # where the file comes from; can be empty


class _Header(NamedTuple):
    origin: Origin
    sizes: Mapping[str, int]  # sizes that transformers' reader ignores
    split: str  # llama.cpp's name of the split before merges; empty: none


def import_gguf(source: GgufSource, folder: Path, dtype: torch.dtype) -> DecoderConfig:
    """Write the folder, or replace it. Return the model's sizes.

    Raises UnusableInput for a file that is broken, of another architecture, or without a tokenizer, and OSError.
    """
    file = source.file
    header = _read_header(source)
    fields, state_dict = _load_model(file, dtype)
    fields |= header.sizes
    config = DecoderConfig.from_hf(fields, file)
    for name, shape in config.compute_weight_shapes().items():
        check_shape(file, name, state_dict[name].shape, shape)
    with tempfile.TemporaryDirectory(prefix="asterism-import-") as scratch:
        described = Path(scratch)
        _write_tokenizer(described, file, config.max_position_embeddings, header.split)
        kept = {name: fields[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id") if name in fields}
        (described / "config.json").write_text(json.dumps(kept), encoding="utf-8")
        (described / ORIGIN_FILE).write_bytes(msgspec.json.format(msgspec.json.encode(header.origin)))
        if source.license_file is not None:
            shutil.copyfile(source.license_file, described / LICENSE_FILE)
        save_model(folder, config, state_dict, described)
    return config


def _read_header(source: GgufSource) -> _Header:
    """Check the header of the file, and read what transformers' reader ignores."""
    file = source.file
    check_file(file)
    reader = _open_reader(file)
    fields = reader.fields
    values = {name: str(field.contents()) for name, field in fields.items() if name.startswith("general.")}
    architecture = values.get("general.architecture", "")
    _check_header(file, architecture, fields.keys(), {each.name for each in reader.tensors})
    head_dim = fields.get(f"{architecture}.attention.key_length")
    types = sorted({each.tensor_type.name for each in reader.tensors if len(each.shape) > 1})
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    described = {name: values.get(f"general.{name}", "") for name in ("name", "organization", "license")}
    origin = Origin(file.name, digest, f"GGUF {', '.join(types)}", **described, source=source.source)
    sizes = {} if head_dim is None else {"head_dim": int(head_dim.contents())}
    return _Header(origin, sizes, str(fields[_SPLIT_FIELD].contents()) if _SPLIT_FIELD in fields else "")


def _open_reader(file: Path) -> GGUFReader:
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise UnusableInput("GGUF files need the package gguf: pip install 'asterism[gguf]'") from None
    try:
        with file.open("rb") as content:
            magic = content.read(len(_MAGIC))
    except OSError as error:
        raise UnusableInput(f"{file}: {error.strerror}") from None
    if magic != _MAGIC:
        raise UnusableInput(f"{file}: is not a GGUF file")
    try:
        return GGUFReader(file)
    except (ValueError, LookupError, OverflowError) as error:  # what a damaged or short file raises
        raise UnusableInput(f"{file}: is damaged or incomplete: {error}") from None


def _check_header(file: Path, architecture: str, fields: Collection[str], tensors: Collection[str]) -> None:
    if problem := find_problem({"model_type": _MODEL_TYPES.get(architecture, architecture)}):
        raise UnsupportedModel(f"{file}: {problem}")
    for field, missing in _REQUIRED_FIELDS.items():
        if field not in fields:
            raise UnusableInput(f"{file}: has {missing} ({field}); convert the model with its tokenizer")
    if _ROPE_TENSOR in tensors or f"{architecture}.{_ROPE_FIELD}" in fields:
        raise UnsupportedModel(
            f"{file}: scales the rotary embedding, which transformers' reader of GGUF files ignores; "
            "use the model's safetensors files"
        )


def _load_model(file: Path, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the fields of config.json and the weights. Raises UnusableInput if the file lacks weights."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar, set_verbosity_error

    set_verbosity_error()
    disable_progress_bar()
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # a progress bar
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                file.parent, gguf_file=file.name, dtype=dtype, output_loading_info=True
            )
    except (ValueError, RuntimeError, LookupError) as error:
        raise UnusableInput(f"{file}: {error}") from None
    model, info = loaded
    missing = sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])})
    if missing:
        raise UnusableInput(f"{file}: lacks {len(missing)} tensors, the first is {missing[0]}")
    fields = model.config.to_dict()
    del fields["quantization_config"]  # describes the file, not these weights
    return _round_floats(fields), model.state_dict()


def _round_floats(fields: Any) -> Any:
    """Return the shortest decimal of each number: a GGUF file has float32, so that 1e-5 reads as 9.99999974e-6."""
    if isinstance(fields, dict):
        return {name: _round_floats(value) for name, value in fields.items()}
    return float(str(np.float32(fields))) if isinstance(fields, float) else fields


def _write_tokenizer(folder: Path, file: Path, max_tokens: int, split: str) -> None:
    """Write tokenizer.json, tokenizer_config.json and the chat template."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (ValueError, LookupError) as error:
        raise UnusableInput(f"{file}: tokenizer: {error}") from None
    _correct_split(tokenizer.backend_tokenizer, file, split)
    tokenizer.save_pretrained(folder)
    special = {name: getattr(tokenizer, name) for name in _SPECIAL_TOKENS if getattr(tokenizer, name) is not None}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_tokens,
        "clean_up_tokenization_spaces": False,
        **special,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _correct_split(tokenizer: Tokenizer, file: Path, split: str) -> None:
    """Replace GPT-2's split where the file names another one. Raises UnusableInput for an unknown name."""
    if not isinstance(tokenizer.pre_tokenizer, ByteLevel) or split in _GPT2_SPLITS:
        return
    if split not in _DIGIT_SPLITS:
        raise UnusableInput(f"{file}: splits text by an unknown rule ({_SPLIT_FIELD} = {split!r})")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([Digits(individual_digits=True), tokenizer.pre_tokenizer])
