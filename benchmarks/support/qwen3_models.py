"""The sizes in the config.json of Qwen3's dense models, from https://huggingface.co/Qwen."""

from typing import Any

from asterism.engine.hf.model_config import DecoderConfig


def make_fields(
    width: int, inner: int, layers: int, heads: int, *, is_tied: bool, vocab_size: int = 151_936
) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "attention_bias": False,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": width,
        "intermediate_size": inner,
        "max_position_embeddings": 40_960,
        "model_type": "qwen3",
        "num_attention_heads": heads,
        "num_hidden_layers": layers,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1_000_000,
        "tie_word_embeddings": is_tied,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


QWEN3 = {
    "0.6B": make_fields(1024, 3072, 28, 16, is_tied=True),
    "1.7B": make_fields(2048, 6144, 28, 16, is_tied=True),
    "4B": make_fields(2560, 9728, 36, 32, is_tied=True),
    "8B": make_fields(4096, 12_288, 36, 32, is_tied=False),
    "14B": make_fields(5120, 17_408, 40, 40, is_tied=False),
}


def read_qwen3(name: str) -> DecoderConfig:
    return DecoderConfig.from_hf(QWEN3[name])
