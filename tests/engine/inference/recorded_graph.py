"""An imitation of CUDA graphs on a CPU: it records the operations of one call and repeats them on the same memory.

It does not repeat Python code. So it ignores changed Python numbers and replaced tensors, as a CUDA graph does.
It refuses operations that depend on the values of tensors, as a CUDA graph does.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DEPENDS_ON_VALUES = (
    "aten::nonzero",
    "aten::masked_select",
    "aten::unique",
    "aten::lift_fresh",
    "aten::repeat_interleave",
)


class Recorded:
    """A GraphCapture (asterism.engine.inference.cuda_graphs) that records operations."""

    def __init__(self) -> None:
        self.graphs = self.replays = 0

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        self.graphs += 1
        run()
        with _Recording() as recording:
            run()

        def replay() -> None:
            self.replays += 1
            recording.repeat()

        return replay


class _Recording(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], list[tuple[int, Tensor]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = tensors((args, kwargs))
        refused = func.name().startswith(DEPENDS_ON_VALUES) or torch.Tag.data_dependent_output in func.tags
        by_mask = func.name().startswith("aten::index") and any(part.dtype == torch.bool for part in given[1:])
        assert not refused and not by_mask, f"{func} cannot be captured"
        out = func(*args, **kwargs)
        lent = {part.untyped_storage().data_ptr() for part in given}
        made = enumerate(tensors(out))
        self._calls.append(
            (
                func,
                args,
                kwargs,
                [(place, part) for place, part in made if part.untyped_storage().data_ptr() not in lent],
            )
        )
        return out

    def repeat(self) -> None:
        """Repeat the operations. Then overwrite intermediate results, because a graph's pool does not preserve them."""
        for func, args, kwargs, made in self._calls:
            again = tensors(func(*args, **kwargs))
            for place, part in made:
                part.copy_(again[place])
        for *_, made in self._calls:
            for _, part in made:
                part.fill_(float("nan") if part.is_floating_point() else 0)


def tensors(tree: object) -> list[Tensor]:
    leaves: Iterable[object] = tree_leaves(tree)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor)]
