"""Patch an unmodified SGLang server to run without CUDA.

`make sglang-environment` writes a .pth file, so that every Python process of that environment imports
this file at its start. This file patches these modules after their import:

    torchvision.extension           declares two operators of the CUDA library, which are never called
    sglang.srt.arg_groups.choices   lets --enable-deterministic-inference, which `sampling_seed` needs, use
                                    attention in plain torch with the prefix cache
    sglang.srt.batch_invariant_ops  disables that option's GPU kernels, so a token's last bits depend on its batch
    sglang.kernels.ops.sampling.murmur_hash    provides the hash of the seeds in place of a separate library
    sglang.srt.lora.layers          leaves memory pageable, because page-locked memory needs a GPU
"""

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_LIBRARIES: list[object] = []  # keeps the libraries, whose removal would remove their operators


def _declare_operators(extension: ModuleType) -> None:
    if extension._has_ops():
        return
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _LIBRARIES.append(library)


def _allow_plain_attention(choices: ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _hash_in_torch(hashing: ModuleType) -> None:
    from murmur_hash import murmur_hash32

    hashing.murmur_hash32 = murmur_hash32


def _leave_kernels_alone(invariant: ModuleType) -> None:
    invariant.enable_batch_invariant_mode = lambda *_args, **_options: None


def _ignore_page_locking(_layers: ModuleType) -> None:
    """Ignore the request to page-lock memory, which LoRA also sends on CPUs."""
    import torch

    def without_pinning(create: Callable[..., object]) -> Callable[..., object]:
        return lambda *values, pin_memory=False, **options: create(*values, **options)

    for name in ("tensor", "zeros"):
        setattr(torch, name, without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_: tensor


_AFTERWARDS: dict[str, Callable[[ModuleType], None]] = {
    "torchvision.extension": _declare_operators,
    "sglang.srt.arg_groups.choices": _allow_plain_attention,
    "sglang.srt.batch_invariant_ops": _leave_kernels_alone,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_in_torch,
    "sglang.srt.lora.layers": _ignore_page_locking,
}


class _Loader(importlib.abc.Loader):
    def __init__(self, wrapped: importlib.abc.Loader, afterwards: Callable[[ModuleType], None]) -> None:
        self._wrapped, self._afterwards = wrapped, afterwards

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._wrapped.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._wrapped.exec_module(module)
        self._afterwards(module)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        afterwards = _AFTERWARDS.get(fullname)
        spec = afterwards and importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if afterwards is None or spec is None or spec.loader is None:
            return None
        spec.loader = _Loader(spec.loader, afterwards)
        return spec


sys.meta_path.insert(0, _Finder())
