"""A torch version of the only vLLM operator that SGLang imports."""

import torch


def rotary_embedding(
    positions: torch.Tensor,  # [T]
    query: torch.Tensor,  # [T, heads * head_size], rotated in place
    key: torch.Tensor,  # [T, KV heads * head_size], rotated in place
    head_size: int,
    cos_sin_cache: torch.Tensor,  # [positions, rotated]: cosines, then sines
    is_neox: bool,
) -> None:
    cos, sin = (
        half.unsqueeze(-2) for half in cos_sin_cache[positions.flatten()].chunk(2, dim=-1)
    )  # [T, 1, rotated / 2]
    rotated = cos_sin_cache.shape[-1]
    for tensor in (query, key):
        heads = tensor.view(cos.shape[0], -1, head_size)[..., :rotated]
        first, second = heads.chunk(2, dim=-1) if is_neox else (heads[..., ::2], heads[..., 1::2])
        turned = (first * cos - second * sin, second * cos + first * sin)
        heads.copy_(torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2))
