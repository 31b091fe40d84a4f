"""The embedded engine's only copy of the weights: fused matrices, and views of them by checkpoint name."""

from typing import NamedTuple

import torch
from torch import Tensor

from engine.model.model_config import Qwen3Config
from engine.model.qwen3 import Qwen3


class LayerWeights(NamedTuple):
    """Matrices are transposed: [in, out]. H heads, K key/value heads."""

    input_norm: Tensor
    qkv: Tensor  # [E, (H + 2 K) * D]
    qk_norm: Tensor  # [H + K, D], with attention's scale; derived from q_norm and k_norm
    q_norm: Tensor  # [D]
    k_norm: Tensor  # [D]
    out: Tensor  # [H * D, E]
    mlp_norm: Tensor
    gate_up: Tensor  # [E, 2 I]
    down: Tensor  # [I, E]


class FusedWeights:
    """Load new weights by writing into `parameters`, then call `update_derived`.

    The tensors keep their addresses, because captured graphs read them. A tied embedding is stored a second time,
    transposed, for the logits.
    """

    def __init__(self, model: Qwen3, device: torch.device) -> None:
        """Copies the model's weights."""
        self.config, self._device = model.config, device
        self._dtype = next(model.parameters()).dtype
        width, vocabulary = self.config.hidden_size, self.config.vocab_size
        self.embedding = self._allocate(vocabulary, width)
        self.lm_head = self._allocate(width, vocabulary)
        self.norm = self._allocate(width)
        self.layers = [self._allocate_layer() for _ in range(self.config.num_layers)]
        self.parameters = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            self.parameters["lm_head.weight"] = self.lm_head.t()
        for number, layer in enumerate(self.layers):
            for name, view in _split_layer(self.config, layer).items():
                self.parameters[f"model.layers.{number}.{name}.weight"] = view
        for name, parameter in model.named_parameters():
            self.parameters[name].copy_(parameter.detach())
        self.update_derived()

    def update_derived(self) -> None:
        """Recompute the tensors that are not views of parameters."""
        config = self.config
        if config.tie_word_embeddings:
            self.lm_head.copy_(self.embedding.t())
        for layer in self.layers:
            layer.qk_norm[: config.num_heads] = layer.q_norm * config.head_dim**-0.5
            layer.qk_norm[config.num_heads :] = layer.k_norm

    def _allocate(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _allocate_layer(self) -> LayerWeights:
        config = self.config
        width, inner, size = config.hidden_size, config.intermediate_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        return LayerWeights(
            input_norm=self._allocate(width),
            qkv=self._allocate(width, (heads + 2 * kv_heads) * size),
            qk_norm=self._allocate(heads + kv_heads, size),
            q_norm=self._allocate(size),
            k_norm=self._allocate(size),
            out=self._allocate(heads * size, width),
            mlp_norm=self._allocate(width),
            gate_up=self._allocate(width, 2 * inner),
            down=self._allocate(inner, width),
        )


def _split_layer(config: Qwen3Config, layer: LayerWeights) -> dict[str, Tensor]:
    """Views of a layer's weights by their checkpoint names, without `.weight`."""
    keys = config.num_kv_heads * config.head_dim
    q, k, v = layer.qkv.t().split([config.num_heads * config.head_dim, keys, keys])
    gate, up = layer.gate_up.t().chunk(2)
    return {
        "input_layernorm": layer.input_norm,
        "self_attn.q_proj": q,
        "self_attn.k_proj": k,
        "self_attn.v_proj": v,
        "self_attn.q_norm": layer.q_norm,
        "self_attn.k_norm": layer.k_norm,
        "self_attn.o_proj": layer.out.t(),
        "post_attention_layernorm": layer.mlp_norm,
        "mlp.gate_proj": gate,
        "mlp.up_proj": up,
        "mlp.down_proj": layer.down.t(),
    }
