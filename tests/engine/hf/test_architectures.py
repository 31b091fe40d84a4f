"""Tests: each architecture equals its version in transformers in names, logits, gradients and saved folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from asterism.engine.hf.architectures import ARCHITECTURES
from asterism.engine.hf.model_config import DecoderConfig, ExpertsConfig, UnsupportedModel, check_weight_shapes
from asterism.engine.hf.rope_scaling import Llama3Rope, YarnRope
from asterism.engine.model.causal_lm import CausalLM, initialize_weights
from asterism.engine.model.hf_checkpoint import CheckpointError, load_model, load_model_config
from asterism.engine.model.rope import compute_rope_tables
from tests.engine.model.transformers_reference import (
    SCALINGS,
    get_gradient,
    load_reference,
    relative_error,
    scaled_architecture,
)
from tests.engine.tiny_models import save_small_model, small_architecture, small_config, small_model
from tests.golden_messages import check_golden_messages

TOLERANCE = 1e-6  # relative to the largest value; the measured error is 7e-7 for logits and 2e-7 for gradients

# Excerpts of published files: Qwen2.5-7B in the layout of transformers 4, Llama 3.1 8B, and Qwen3-30B-A3B.
QWEN2_5: dict[str, Any] = json.loads("""{
    "architectures": ["Qwen2ForCausalLM"], "attention_dropout": 0.0, "hidden_act": "silu", "hidden_size": 3584,
    "intermediate_size": 18944, "max_position_embeddings": 131072, "max_window_layers": 28,
    "model_type": "qwen2", "num_attention_heads": 28, "num_hidden_layers": 28, "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": false,
    "use_mrope": false, "use_sliding_window": false, "vocab_size": 152064
}""")
LLAMA_3_1: dict[str, Any] = json.loads("""{
    "attention_bias": false, "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 131072, "mlp_bias": false, "model_type": "llama", "num_attention_heads": 32,
    "num_hidden_layers": 32, "num_key_value_heads": 8, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "rope_theta": 500000.0, "vocab_size": 128256
}""")
QWEN3_MOE: dict[str, Any] = json.loads("""{
    "attention_bias": false, "decoder_sparse_step": 1, "head_dim": 128, "hidden_act": "silu",
    "hidden_size": 2048, "intermediate_size": 6144, "max_position_embeddings": 40960, "max_window_layers": 48,
    "mlp_only_layers": [], "model_type": "qwen3_moe", "moe_intermediate_size": 768, "norm_topk_prob": true,
    "num_attention_heads": 32, "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 1000000.0,
    "sliding_window": null, "tie_word_embeddings": false, "use_sliding_window": false, "vocab_size": 151936
}""")


# ---------------------------------------------------------------- config.json


@pytest.mark.parametrize(
    ("fields", "parameters"), [(QWEN2_5, 7_615_616_512), (LLAMA_3_1, 8_030_261_248), (QWEN3_MOE, 30_532_122_624)]
)
def test_published_configs_have_the_published_numbers_of_parameters(fields: dict[str, Any], parameters: int) -> None:
    shapes = DecoderConfig.from_hf(fields).compute_weight_shapes()
    assert sum(torch.Size(shape).numel() for shape in shapes.values()) == parameters


def test_options_are_read_from_published_configs() -> None:
    qwen2_5, llama, moe = (DecoderConfig.from_hf(fields) for fields in (QWEN2_5, LLAMA_3_1, QWEN3_MOE))
    assert (qwen2_5.head_dim, qwen2_5.rope_theta, qwen2_5.architecture.has_qkv_bias) == (128, 1e6, True)
    assert llama.rope_scaling == Llama3Rope(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    assert (llama.head_dim, llama.rope_theta) == (128, 5e5)
    assert moe.experts is not None
    assert (moe.experts.num_experts, moe.experts.experts_per_token, moe.experts.expert_size) == (128, 8, 768)
    assert moe.experts.normalizes_weights


@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_config_is_equal_after_conversion_to_transformers_and_back(model_type: str, scaling: str) -> None:
    config = scaled_architecture(model_type, scaling, rope_theta=1_000_000)
    version_5 = config.to_hf()
    version_4 = {name: value for name, value in version_5.items() if name != "rope_parameters"}
    only_version_5 = {name: value for name, value in version_5.items() if name not in ("rope_scaling", "rope_theta")}
    assert [DecoderConfig.from_hf(fields) for fields in (version_5, version_4, only_version_5)] == [config] * 3


def test_the_original_context_of_yarn_defaults_to_max_position_embeddings() -> None:
    fields = small_config(max_position_embeddings=96).to_hf() | {"rope_scaling": {"type": "yarn", "factor": 4}}
    assert DecoderConfig.from_hf(fields).rope_scaling == YarnRope(factor=4.0, original_max_position_embeddings=96)


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_weight_shapes_equal_the_shapes_of_model_parameters(model_type: str) -> None:
    for tied in (True, False):
        config = small_architecture(model_type, tie_word_embeddings=tied)
        found = {name: tuple(parameter.shape) for name, parameter in CausalLM(config).named_parameters()}
        assert found == config.compute_weight_shapes()


def test_the_error_for_an_unsupported_model_names_the_missing_feature() -> None:
    """An input is the name of a config, with changed fields as JSON."""
    published = {"qwen2.5": QWEN2_5, "llama": LLAMA_3_1, "qwen3-moe": QWEN3_MOE, "qwen3": small_config().to_hf()}

    def read(case: str) -> None:
        name, _, changes = case.partition(": ")
        fields = published[name] | json.loads(changes)
        removed = fields.pop("without", "")
        DecoderConfig.from_hf({key: each for key, each in fields.items() if key != removed}, "here/config.json")

    check_golden_messages(Path(__file__).with_name("config_messages.txt"), read, {}, UnsupportedModel)


# ---------------------------------------------------------------- weights


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_a_saved_folder_is_complete_and_loads_the_same_weights(tmp_path: Path, model_type: str) -> None:
    model = small_model(config=small_architecture(model_type, vocab_size=280))
    folder = save_small_model(tmp_path, model)
    assert check_weight_shapes(folder) == sum(parameter.numel() for parameter in model.parameters())
    loaded, expected = load_model(folder).state_dict(), model.state_dict()
    assert load_model_config(folder) == model.config
    assert loaded.keys() == expected.keys()
    assert all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.mark.parametrize(
    ("model_type", "error", "message"),
    [
        (
            "llama",
            CheckpointError,
            r"model\.safetensors: 6 tensors do not belong to the model of config\.json, the first is .*k_proj\.bias",
        ),
        ("mistral", UnsupportedModel, r"model/config\.json: model_type is 'mistral'; missing: sliding"),
    ],
)
def test_a_folder_of_another_architecture_is_refused(
    tmp_path: Path, model_type: str, error: type[Exception], message: str
) -> None:
    folder = save_small_model(tmp_path, small_model(config=small_architecture("qwen2", vocab_size=280)))
    fields = json.loads((folder / "config.json").read_text()) | {"model_type": model_type}
    (folder / "config.json").write_text(json.dumps(fields))
    for read in (check_weight_shapes, load_model):
        with pytest.raises(error, match=message):
            read(folder)


def test_initial_biases_are_0() -> None:
    model = CausalLM(small_architecture("qwen2"))
    initialize_weights(model, 0)
    assert model.get_parameter("model.layers.1.self_attn.q_proj.bias").abs().max() == 0
    assert model.get_parameter("model.norm.weight").min() == 1


# ---------------------------------------------------------------- transformers


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ARCHITECTURES)
@pytest.mark.parametrize(("scaling", "tied"), [*((name, True) for name in SCALINGS), ("default", False)])
def test_logits_gradients_and_saved_weights_equal_transformers(
    tmp_path: Path, model_type: str, scaling: str, tied: bool
) -> None:
    config = scaled_architecture(model_type, scaling, tie_word_embeddings=tied)
    model = small_model(config=config, std=0.1)
    theirs = load_reference(tmp_path, model)
    theirs.save_pretrained(tmp_path / "theirs")
    again = load_model(tmp_path / "theirs")
    assert again.config == config
    assert all(torch.equal(again.get_parameter(name), each) for name, each in model.named_parameters())

    token_ids = torch.randint(0, 280, (3, 100), generator=torch.Generator().manual_seed(0))
    ours, expected = model.requires_grad_(True).compute_logits(model(token_ids)), theirs(token_ids).logits
    assert relative_error(ours, expected) < TOLERANCE
    ours.log_softmax(-1)[..., 0].sum().backward()
    expected.log_softmax(-1)[..., 0].sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    wanted = {name: get_gradient(theirs, name) for name in found}
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in found.items():
        assert gradient is not None, name
        assert float((gradient - wanted[name]).abs().max()) < TOLERANCE * largest, name


@pytest.mark.slow
@pytest.mark.parametrize("scaling", SCALINGS)
def test_rotary_tables_equal_those_of_transformers_in_every_bit(tmp_path: Path, scaling: str) -> None:
    model = small_model(config=scaled_architecture("llama", scaling))
    positions = torch.arange(300)
    cos, sin = load_reference(tmp_path, model).model.rotary_emb(torch.zeros(1), positions[None])
    found_cos, signed_sin = compute_rope_tables(positions, model.config)
    half = model.config.head_dim // 2
    assert torch.equal(found_cos, cos[0])
    assert torch.equal(torch.cat((-signed_sin[:, :half], signed_sin[:, half:]), -1), sin[0])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"normalizes_weights": False}, {"sparse_step": 2}, {"experts_per_token": 1}])
def test_options_of_experts_have_the_same_effect_as_in_transformers(tmp_path: Path, options: dict[str, Any]) -> None:
    experts = ExpertsConfig(**{"num_experts": 6, "experts_per_token": 2, "expert_size": 24, **options})
    config = small_architecture("qwen3_moe", experts=experts, vocab_size=280)
    assert config.has_experts(0) == ("sparse_step" not in options)
    model = small_model(config=config, std=0.1)
    token_ids = torch.randint(0, 280, (2, 20), generator=torch.Generator().manual_seed(0))
    assert (
        relative_error(model.compute_logits(model(token_ids)), load_reference(tmp_path, model)(token_ids).logits)
        < TOLERANCE
    )
