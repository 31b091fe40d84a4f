"""`asterism model import` converts GGUF files, keeps their origin, and refuses files that it would convert wrongly."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from asterism.configs.errors import UnusableInput
from asterism.engine.export.gguf_import import GgufSource, import_gguf
from asterism.engine.export.hf_export import write_model_description
from asterism.engine.export.origin import read_origin
from tests.engine.export.family_folders import FAMILY_KINDS, TEXTS, write_family_model
from tests.engine.export.gguf_files import GgufChanges, write_gguf

pytestmark = pytest.mark.slow
CALL_TEXT = "<|im_start|>user\nIt's 1234 + 5.75\n\n  x_1?<|im_end|>\n"


@pytest.fixture(scope="module", params=["qwen2.5", "qwen3", "llama3"])
def original(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_model(tmp_path_factory.mktemp(request.param) / "model", FAMILY_KINDS[request.param])


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family_model(tmp_path_factory.mktemp("llama") / "model", FAMILY_KINDS["llama3"])


def convert(file: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    import_gguf(GgufSource(file, None, ""), folder, dtype)
    return folder


def test_a_folder_has_the_weights_the_sizes_and_the_tokenizer_of_the_converted_model(
    original: Path, tmp_path: Path
) -> None:
    folder = convert(write_gguf(tmp_path / "model.gguf", original), tmp_path / "out")
    found, expected = (load_file(each / "model.safetensors") for each in (folder, original))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    configs = [json.loads((each / "config.json").read_text()) for each in (folder, original)]
    for config in configs:
        for key in ("bos_token_id", "pad_token_id", "dtype"):
            config.pop(key, None)
    assert configs[0] == configs[1]
    tokenizers = [Tokenizer.from_file(str(each / "tokenizer.json")) for each in (folder, original)]
    for text in (*TEXTS, CALL_TEXT):
        ids = [tokenizer.encode(text, add_special_tokens=False).ids for tokenizer in tokenizers]
        assert ids[0] == ids[1]
    described = json.loads((original / "tokenizer_config.json").read_text())
    assert (folder / "chat_template.jinja").read_text() == described["chat_template"]


def test_quantized_matrices_become_floats_within_the_rounding_of_their_type(llama: Path, tmp_path: Path) -> None:
    kind = gguf.GGMLQuantizationType.Q8_0
    file = write_gguf(tmp_path / "model.gguf", llama, GgufChanges(quantization=kind))
    folder = convert(file, tmp_path / "out")
    found, expected = (load_file(each / "model.safetensors") for each in (folder, llama))
    for name, tensor in expected.items():
        step = tensor.abs().max() / 127  # the step of a block of Q8_0 is at most that of the tensor
        assert (found[name] - tensor).abs().max() <= (0.51 * step if tensor.shape[-1] % 32 == 0 else 0), name
    assert not torch.equal(found["model.embed_tokens.weight"], expected["model.embed_tokens.weight"])
    origin = read_origin(folder)
    assert origin is not None
    assert (origin.file, origin.format, origin.license, origin.name) == ("model.gguf", "GGUF F32, Q8_0", "mit", "Small")


@pytest.mark.parametrize(
    ("split", "pieces"),
    [("gpt-2", ["x", ":", "Ġ", "Ġ12", "Ċ", "Ċ", "3"]), ("smollm", ["x", ":", "ĠĠ", "1", "2", "ĊĊ", "3"])],
)
def test_the_tokenizer_splits_text_by_the_rule_that_the_file_names(
    llama: Path, tmp_path: Path, split: str, pieces: list[str]
) -> None:
    """SmolLM splits off each digit first, so that blanks before a digit stay together."""
    folder = convert(write_gguf(tmp_path / "model.gguf", llama, GgufChanges(split=split)), tmp_path / "out")
    splitter = Tokenizer.from_file(str(folder / "tokenizer.json")).pre_tokenizer
    assert splitter is not None
    assert [piece for piece, _ in splitter.pre_tokenize_str("x:  12\n\n3")] == pieces


BAD_FILES = {
    "another architecture": (GgufChanges(architecture="gemma3"), "model_type is 'gemma3'; missing: sliding-window"),
    "no tokenizer": (GgufChanges(has_tokenizer=False), "has no tokenizer (tokenizer.ggml.tokens)"),
    "a missing tensor": (
        GgufChanges(without=("blk.1.ffn_up.weight",)),
        "lacks 1 tensors, the first is model.layers.1.mlp.up_proj.weight",
    ),
    "a tensor that scales the rotary embedding": (
        GgufChanges(more={"rope_freqs.weight": np.ones(8, np.float32)}),
        "scales the rotary embedding",
    ),
    "a field that scales the rotary embedding": (GgufChanges(rope_scaling="yarn"), "scales the rotary embedding"),
    "an unknown split": (GgufChanges(split="bloom"), "splits text by an unknown rule (tokenizer.ggml.pre = 'bloom')"),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_file_that_would_be_converted_wrongly_is_refused(name: str, llama: Path, tmp_path: Path) -> None:
    changes, message = BAD_FILES[name]
    file = write_gguf(tmp_path / "bad.gguf", llama, changes)
    with pytest.raises(UnusableInput) as refusal:
        convert(file, tmp_path / "out")
    assert str(refusal.value).startswith(f"{file}: {message}")
    assert not (tmp_path / "out").exists()


def test_a_file_that_is_cut_off_anywhere_is_refused(llama: Path, tmp_path: Path) -> None:
    content = write_gguf(tmp_path / "good.gguf", llama).read_bytes()
    file = tmp_path / "cut.gguf"
    for size in (0, 3, 10, 100, 3000, len(content) // 2, len(content) - 100):
        file.write_bytes(content[:size])
        with pytest.raises(UnusableInput, match=r"cut\.gguf: is (not a GGUF file|damaged or incomplete)"):
            convert(file, tmp_path / "out")
    file.write_bytes(b"GGUX" + content[4:])
    with pytest.raises(UnusableInput, match=r"cut\.gguf: is not a GGUF file"):
        convert(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_written_from_an_imported_one_keeps_origin_and_licence(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "terms.txt").write_text("You may.\n")
    source = GgufSource(write_gguf(tmp_path / "model.gguf", llama), tmp_path / "terms.txt", "a package")
    config = import_gguf(source, tmp_path / "out", torch.float32)
    (tmp_path / "export").mkdir()
    write_model_description(tmp_path / "export", config, tmp_path / "out", torch.float32)
    origin = read_origin(tmp_path / "export")
    assert origin is not None and origin == read_origin(tmp_path / "out")
    assert origin.source == "a package"
    assert (tmp_path / "export" / "LICENSE").read_text() == "You may.\n"
