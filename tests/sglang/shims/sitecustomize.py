"""On PYTHONPATH of an SGLang server on a machine without CUDA: fills the gaps that keep the unmodified server from running there.

Python imports this file in every process of the server, before anything else. It changes a module right after it was
imported, and nothing where the server does not import it:

    torchvision.extension           torchvision's library for CUDA does not load, so two operators are declared, never called
    sglang.srt.arg_groups.choices   --enable-deterministic-inference takes attention in plain torch, with the prefix cache:
                                    it is what makes a request's `sampling_seed` count
    sglang.srt.batch_invariant_ops  that option's kernels are for GPUs; without them a token's last bits depend on its batch
    sglang.kernels.ops.sampling.murmur_hash    the seeds' hash, which is else in a library of its own
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

_KEPT: list[object] = []  # a library's operators live as long as it does


def _declare_operators(extension: ModuleType) -> None:
    if extension._has_ops():
        return
    from torch.library import Library

    library = Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _KEPT.append(library)


def _allow_plain_attention(choices: ModuleType) -> None:
    choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES.append("torch_native")
    choices.RADIX_SUPPORTED_DETERMINISTIC_ATTENTION_BACKEND.append("torch_native")


def _hash_in_torch(hashing: ModuleType) -> None:
    from murmur_hash import murmur_hash32

    hashing.murmur_hash32 = murmur_hash32


def _leave_kernels_alone(invariant: ModuleType) -> None:
    invariant.enable_batch_invariant_mode = lambda *_args, **_options: None


_AFTERWARDS: dict[str, Callable[[ModuleType], None]] = {
    "torchvision.extension": _declare_operators,
    "sglang.srt.arg_groups.choices": _allow_plain_attention,
    "sglang.srt.batch_invariant_ops": _leave_kernels_alone,
    "sglang.kernels.ops.sampling.murmur_hash": _hash_in_torch,
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
