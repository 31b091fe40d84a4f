"""The weights with the adapters added, W + (alpha / r) B A, from the rows of this rank.

A rank has the same rows of W and of B. The matrices A are small: each rank gathers all of them.
"""

from torch import Tensor, nn

from engine.learner.distributed import gather_full, get_local
from engine.model.lora import list_adapters, merge_rows


class AdapterMerger:
    def __init__(self, model: nn.Module) -> None:
        """`model`: with or without adapters, whole or sharded over the ranks."""
        self._layers = {f"{name}.weight": layer for name, layer in list_adapters(model).items()}
        self._whole_a: dict[str, Tensor] = {}

    def gather(self) -> None:
        """Every rank calls it before it merges the present weights."""
        self._whole_a = {name: gather_full(layer.lora_A.weight.detach()) for name, layer in self._layers.items()}

    def merge(self, name: str, block: Tensor, first_row: int) -> Tensor:
        """`block`: rows of the weights `name` from `first_row` of this rank on. Without an adapter, the block itself."""
        layer = self._layers.get(name)
        if layer is None:
            return block
        rows_b = get_local(layer.lora_B.weight)[first_row : first_row + len(block)]
        return merge_rows(block, rows_b, self._whole_a[name], layer.options.scale)
