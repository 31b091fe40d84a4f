"""A check of every tensor that a function of torch.distributed sends."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

SENDING = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "gather", "scatter", "reduce_scatter", "all_to_all"),
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "send", "recv"),
)


@contextmanager
def checking_collectives(check: Callable[[str, Tensor, Any], None], *, calls: bool) -> Generator[None]:
    """Pass each function name, tensor and group (None: default) to `check`. `calls`: also run the collective."""

    def replace(name: str) -> Callable[..., Any]:
        original = getattr(dist, name)

        def send(*args: Any, **kwargs: Any) -> Any:
            group = next((each for each in (*args, *kwargs.values()) if _is_group(each)), None)
            for each in tree_leaves((args, kwargs)):
                if isinstance(each, Tensor):
                    check(name, each, group)
            return original(*args, **kwargs) if calls else None

        return send

    with patch.multiple(dist, **{name: replace(name) for name in SENDING}):
        yield


class NoGroup:
    """A stand-in for a process group, which is sufficient if collectives are not called."""


def _is_group(value: object) -> bool:
    return isinstance(value, NoGroup | dist.ProcessGroup)
