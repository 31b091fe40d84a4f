"""The embedded engine's only copy of the weights: fused matrices, and their views by checkpoint name."""

from typing import NamedTuple

import torch
from torch import Tensor

from asterism.engine.hf.model_config import DecoderConfig
from asterism.engine.inference.kernels.matmul import PLAIN, Matmul
from asterism.engine.model.causal_lm import CausalLM


class MlpWeights(NamedTuple):
    """The weights of an MLP. Matrices are transposed: [in, out]."""

    gate_up: Tensor  # [E, 2 I]
    down: Tensor  # [I, E]


class ExpertWeights(NamedTuple):
    """The weights of X experts. Their matrices are not transposed, because grouped products read both layouts."""

    router: Tensor  # [E, X]
    gate_up: Tensor  # [X, 2 I, E]
    down: Tensor  # [X, E, I]


class LayerWeights(NamedTuple):
    """The weights of a layer with H heads and K key/value heads. Matrices are transposed: [in, out]."""

    input_norm: Tensor
    qkv: Tensor  # [E, (H + 2 K) * D]
    qkv_bias: Tensor | None  # [(H + 2 K) * D]
    qk_scale: Tensor  # [H + K, D], derived: norms of queries and keys times attention's scale
    q_norm: Tensor | None  # [D]
    k_norm: Tensor | None  # [D]
    out: Tensor  # [H * D, E]
    mlp_norm: Tensor
    mlp: MlpWeights | ExpertWeights


class FusedWeights:
    """The weights of all layers. To load new weights, write into `parameters`, then call `update_derived`.

    The tensors keep their addresses, because captured graphs read them. A tied embedding has a second, transposed or
    packed copy for the logits. `prepared_layers` and `prepared_head` contain the matrices as `matmul` expects them.
    """

    def __init__(self, model: CausalLM, device: torch.device, matmul: Matmul = PLAIN) -> None:
        """Copy the model's weights."""
        self.config, self._device, self._matmul = model.config, device, matmul
        self.dtype = next(model.parameters()).dtype
        width, vocabulary = self.config.hidden_size, self.config.vocab_size
        self.embedding = self._allocate(vocabulary, width)
        copies_head = not (self.config.tie_word_embeddings and matmul.packs)
        self.lm_head = self._allocate(width, vocabulary) if copies_head else self.embedding.t()
        self.norm = self._allocate(width)
        self.layers = [self._allocate_layer(number) for number in range(self.config.num_layers)]
        self.parameters = {"model.embed_tokens.weight": self.embedding, "model.norm.weight": self.norm}
        if not self.config.tie_word_embeddings:
            self.parameters["lm_head.weight"] = self.lm_head.t()
        for number, layer in enumerate(self.layers):
            for name, view in _split_layer(self.config, layer).items():
                self.parameters[f"model.layers.{number}.{name}"] = view
        for name, parameter in model.named_parameters():
            self.parameters[name].copy_(parameter.detach())
        self.update_derived()

    def update_derived(self) -> None:
        """Recompute the tensors that are not views of parameters."""
        config = self.config
        if config.tie_word_embeddings and not self._matmul.packs:
            self.lm_head.copy_(self.embedding.t())
        for layer in self.layers:
            layer.qk_scale[: config.num_heads] = config.head_dim**-0.5
            layer.qk_scale[config.num_heads :] = 1.0
            if layer.q_norm is not None and layer.k_norm is not None:
                layer.qk_scale[: config.num_heads] *= layer.q_norm
                layer.qk_scale[config.num_heads :] *= layer.k_norm
        self.prepared_layers = [self._prepare_layer(layer) for layer in self.layers]
        self.prepared_head = self._matmul.prepare(self.lm_head)

    def _prepare_layer(self, layer: LayerWeights) -> LayerWeights:
        mlp = layer.mlp
        if isinstance(mlp, MlpWeights):
            prepared = MlpWeights(self._matmul.prepare(mlp.gate_up), self._matmul.prepare(mlp.down))
        else:
            prepared = mlp._replace(router=self._matmul.prepare(mlp.router))
        return layer._replace(qkv=self._matmul.prepare(layer.qkv), out=self._matmul.prepare(layer.out), mlp=prepared)

    def _allocate(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.dtype, device=self._device)

    def _allocate_layer(self, number: int) -> LayerWeights:
        config, architecture = self.config, self.config.architecture
        width, size = config.hidden_size, config.head_dim
        heads, kv_heads = config.num_heads, config.num_kv_heads
        has_norms, outputs = architecture.has_qk_norm, (heads + 2 * kv_heads) * size
        return LayerWeights(
            input_norm=self._allocate(width),
            qkv=self._allocate(width, outputs),
            qkv_bias=self._allocate(outputs) if architecture.has_qkv_bias else None,
            qk_scale=self._allocate(heads + kv_heads, size),
            q_norm=self._allocate(size) if has_norms else None,
            k_norm=self._allocate(size) if has_norms else None,
            out=self._allocate(heads * size, width),
            mlp_norm=self._allocate(width),
            mlp=self._allocate_mlp(number),
        )

    def _allocate_mlp(self, number: int) -> MlpWeights | ExpertWeights:
        config, experts, width = self.config, self.config.experts, self.config.hidden_size
        if experts is None or not config.has_experts(number):
            inner = config.intermediate_size
            return MlpWeights(self._allocate(width, 2 * inner), self._allocate(inner, width))
        count, inner = experts.num_experts, experts.expert_size
        return ExpertWeights(
            router=self._allocate(width, count),
            gate_up=self._allocate(count, 2 * inner, width),
            down=self._allocate(count, width, inner),
        )


def _split_layer(config: DecoderConfig, layer: LayerWeights) -> dict[str, Tensor]:
    """Return views of a layer's weights by their checkpoint names."""
    keys = config.num_kv_heads * config.head_dim
    sizes, names = [config.num_heads * config.head_dim, keys, keys], ("q_proj", "k_proj", "v_proj")
    views = {
        "input_layernorm.weight": layer.input_norm,
        "self_attn.o_proj.weight": layer.out.t(),
        "post_attention_layernorm.weight": layer.mlp_norm,
    }
    for name, weight in zip(names, layer.qkv.t().split(sizes), strict=True):
        views[f"self_attn.{name}.weight"] = weight
    if layer.qkv_bias is not None:
        for name, bias in zip(names, layer.qkv_bias.split(sizes), strict=True):
            views[f"self_attn.{name}.bias"] = bias
    if layer.q_norm is not None and layer.k_norm is not None:
        views |= {"self_attn.q_norm.weight": layer.q_norm, "self_attn.k_norm.weight": layer.k_norm}
    if isinstance(layer.mlp, MlpWeights):
        return views | _name_mlp("mlp", layer.mlp.gate_up.t(), layer.mlp.down.t())
    views["mlp.gate.weight"] = layer.mlp.router.t()
    for number, (gate_up, down) in enumerate(zip(layer.mlp.gate_up, layer.mlp.down, strict=True)):
        views |= _name_mlp(f"mlp.experts.{number}", gate_up, down)
    return views


def _name_mlp(prefix: str, gate_up: Tensor, down: Tensor) -> dict[str, Tensor]:
    """Name the matrices of an MLP: `gate_up` [2 I, E], `down` [E, I]."""
    gate, up = gate_up.chunk(2)
    named = {"gate_proj": gate, "up_proj": up, "down_proj": down}
    return {f"{prefix}.{name}.weight": view for name, view in named.items()}
