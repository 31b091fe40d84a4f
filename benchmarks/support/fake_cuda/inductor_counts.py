"""Counts the kernels of compiled functions. Inductor's scheduler for CUDA decides which operations share a kernel.

A dispatch mode misses operations inside compiled code. Dynamo and AOTAutograd therefore trace a function on fake CUDA
tensors, with its checkpointing, and divide it into a forward and a backward graph as torch.compile does. Inductor lowers
each graph and fuses its operations for Triton. Neither a GPU nor Triton is needed, because no code is generated. With
Triton, `generate_code` returns the code of a graph.

Differences from torch.compile on a GPU: sizes are static, the passes that match patterns of a whole graph do not run, and
only the outputs and the saved tensors of compiled code count as memory.
"""

# pyright: reportPrivateUsage=false
# Reason: torch has no public names for these functions.

from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, partial
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._guards import detect_fake_mode
from torch.fx import GraphModule, Node
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from benchmarks.support.fake_cuda.call_sites import CallSite
from benchmarks.support.fake_cuda.operation_costs import (
    KernelCount,
    count_product_flops,
    get_base_name,
    get_storage_key,
    sum_counts,
)
from benchmarks.support.fake_cuda.operation_log import get_active_log

_compile = torch.compile  # the original function, before torch_patches.py replaces it
_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
_CACHED_ROW_BYTES = 128 << 10  # largest cached row; an H100 has 384 KB of L2 cache per multiprocessor
GraphListener = Callable[[GraphModule, Sequence[Any]], None]
_listeners: list[GraphListener] = []


class _Read(NamedTuple):
    """A read of a buffer by one operation of a fused kernel."""

    loop: int
    num_bytes: int
    is_gather: bool


class CompiledCount(NamedTuple):
    """Kernels of a compiled function in the forward and in the backward pass."""

    forward: KernelCount
    backward: KernelCount


def count_compiled_part(part: Callable[..., Any], *args: Any, **kwargs: Any) -> CompiledCount:
    """Count the kernels of `part`, compiled for these arguments: fake CUDA tensors, modules on fake CUDA, constants.

    The backward pass starts at all outputs. Its count is 0 if no argument needs a gradient.
    """
    backend = _CountingBackend(part)
    made = _compile_with(part, backend)(*args, **kwargs)
    trained = [each for each in tree_leaves(made) if isinstance(each, Tensor) and each.requires_grad]
    if trained:
        torch.autograd.backward(trained, [torch.empty_like(each) for each in trained])
    return CompiledCount(sum_counts(backend.counts["forward"]), sum_counts(backend.counts["backward"]))


def compile_for_counts(model: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replace torch.compile. A call of the result makes outputs without values, and records the compiled kernels."""
    if model is None:
        return partial(compile_for_counts, **options)
    return _compile_with(model, _CountingBackend(model))


def _compile_with(model: Callable[..., Any], backend: "_CountingBackend") -> Callable[..., Any]:
    """Compile separately for each shape: with symbolic sizes, all shapes would get the counts of the first one."""
    torch._dynamo.config.recompile_limit = 1000
    torch._dynamo.config.accumulated_recompile_limit = 10_000
    return _compile(model, backend=backend, fullgraph=True, dynamic=False)


class _CountingBackend:
    """A backend of torch.compile that counts kernels."""

    def __init__(self, model: Callable[..., Any]) -> None:
        self.counts: dict[str, list[KernelCount]] = {"forward": [], "backward": []}
        self._site = CallSite(model.__module__, getattr(model, "__qualname__", type(model).__qualname__))

    def __call__(self, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.partitioners import min_cut_rematerialization_partition
        from torch._inductor.decomposition import select_decomp_table

        compile_forward = partial(self._compile_graph, "forward")
        return aot_autograd(
            fw_compiler=compile_forward,
            bw_compiler=partial(self._compile_graph, "backward"),
            inference_compiler=compile_forward,
            partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
            decompositions=select_decomp_table(),
            keep_inference_input_mutations=True,
        )(graph, inputs)

    def _compile_graph(self, direction: str, graph: GraphModule, inputs: Sequence[Any]) -> Callable[..., list[Any]]:
        count, outputs = count_graph(graph, inputs), _GraphOutputs(graph)
        for listener in _listeners:
            listener(graph, inputs)
        self.counts[direction].append(count)

        def run(given: list[Any]) -> list[Any]:
            tensors = list(given)
            given.clear()  # lets the saved tensors be freed
            if log := get_active_log():
                log.record_kernels(f"compiled {direction}", count, self._site)
            return outputs.make(tensors)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run


class _GraphOutputs:
    """Makes the outputs of a call: inputs, or new tensors. Outputs that share memory in the graph share it here."""

    def __init__(self, graph: GraphModule) -> None:
        nodes = list(graph.graph.nodes)
        self._inputs: list[Node] = [node for node in nodes if node.op == "placeholder"]
        (outputs,) = (node.args[0] for node in nodes if node.op == "output")
        self._outputs: Sequence[Any] = outputs

    def make(self, given: Sequence[Any]) -> list[Any]:
        by_node = dict(zip(self._inputs, given, strict=True))
        pairs = ((node.meta.get("val"), each) for node, each in by_node.items())
        bases = {get_storage_key(value): each for value, each in pairs if isinstance(value, Tensor)}
        return [self._make_one(each, by_node, bases) if isinstance(each, Node) else each for each in self._outputs]

    def _make_one(self, node: Node, by_node: Mapping[Node, Any], bases: dict[int, Tensor]) -> Any:
        value = node.meta.get("val")
        if node in by_node or not isinstance(value, Tensor):
            return by_node.get(node, value)
        key = get_storage_key(value)
        base = bases.get(key)
        if base is None:
            elements = value.untyped_storage().nbytes() // value.element_size()
            base = bases[key] = torch.empty(elements, dtype=value.dtype, device=value.device)
        return base.as_strided(value.shape, value.stride(), value.storage_offset())


# ---------------------------------------------------------------- one graph


def count_graph(graph: GraphModule, inputs: Sequence[Any]) -> KernelCount:
    """Count the kernels after Inductor's fusion. Products are kernels of a library and are not fused."""
    total = KernelCount(product_flops=sum(map(_count_flops, graph.graph.nodes)))
    for is_product, moved in _schedule(graph, inputs):
        if is_product:
            total = total.plus(KernelCount(1, 1, product_bytes=moved))
        else:
            total = total.plus(KernelCount(1, pointwise_bytes=moved))
    return total


def _count_flops(node: Node) -> int:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return 0
    base = get_base_name(node.target)
    if base not in _PRODUCTS:
        return 0
    values = [each.meta["val"] if isinstance(each, Node) else each for each in node.args]
    return count_product_flops(base, values, node.meta["val"])


def _schedule(graph: GraphModule, inputs: Sequence[Any]) -> list[tuple[bool, int]]:
    """Return for each kernel of a graph whether it is a product, and its bytes of memory traffic."""
    from torch._inductor.scheduler import NopKernelSchedulerNode

    with _lowered(graph, inputs) as lowering:
        lowering.init_wrapper_code()
        lowering._update_scheduler()
        kernels = [node for node in lowering.scheduler.nodes if not isinstance(node, NopKernelSchedulerNode)]
        return [(_is_product(node), _count_bytes(node)) for node in kernels]


def _count_bytes(kernel: Any) -> int:
    """Count the bytes that a kernel reads and writes.

    Inductor counts each whole buffer once. But a gather reads only the elements that it returns, and a kernel reads a
    row again in each of its loops if the caches cannot hold the row.
    """
    from torch._inductor.virtualized import V

    accesses = kernel.get_read_write_buffer_accesses(include_reads=True, include_writes=True)
    for name, reads in _collect_reads(kernel).items():
        row_bytes = int(kernel.group[1][1]) * V.graph.get_dtype(name).itemsize
        if name in accesses and all(read.is_gather for read in reads):
            accesses[name] = min(accesses[name], sum(read.num_bytes for read in reads))
        elif name in accesses and row_bytes > _CACHED_ROW_BYTES:
            by_loop = {read.loop: read.num_bytes for read in reads if not read.is_gather}
            accesses[name] += sum(by_loop.values()) - max(by_loop.values())
    return sum(accesses.values())


def _collect_reads(kernel: Any) -> Mapping[str, list[_Read]]:
    """Collect the reads by buffer. A loop that needs the result of a reduction follows the loop with the reduction."""
    from torch._inductor.dependencies import MemoryDep
    from torch._inductor.scheduler import SchedulerNode
    from torch._inductor.virtualized import V

    known: dict[str, int] = {}  # number of the first loop that can read the written value of each buffer
    reads: defaultdict[str, list[_Read]] = defaultdict(list)
    for node in kernel.get_nodes():
        if not isinstance(node, SchedulerNode):
            continue
        needed = [each for each in node.read_writes.reads if isinstance(each, MemoryDep)]
        loop = max((known.get(each.name, 0) for each in needed), default=0)
        known.update({each.name: loop + node.is_reduction() for each in node.read_writes.writes})
        for each in needed:
            elements = prod(map(int, chain(*node.get_ranges()))) if each.is_indirect() else each.numel_hint()
            itemsize = V.graph.get_dtype(each.name).itemsize
            reads[each.name].append(_Read(loop, elements * itemsize, each.is_indirect()))
    return reads


def generate_code(graph: GraphModule, inputs: Sequence[Any]) -> str:
    """Return a graph's Python code with its Triton kernels. Triton needs an active driver."""
    with _lowered(graph, inputs) as lowering:
        return lowering.codegen()[0].value


@contextmanager
def listening(listener: GraphListener) -> Generator[None]:
    """Call the listener with each graph that is compiled while the context is open."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


@contextmanager
def _lowered(graph: GraphModule, inputs: Sequence[Any]) -> Generator[Any]:
    """Yield Inductor's GraphLowering of a graph, with the handlers that it needs."""
    from torch._inductor.debug import DebugContext
    from torch._inductor.graph import GraphLowering
    from torch._inductor.virtualized import V

    _allow_cuda_without_triton()
    with _disable_current_modes(), V.set_fake_mode(detect_fake_mode(inputs)):
        lowering = GraphLowering(graph, example_inputs=inputs)
        with V.set_graph_handler(lowering), V.set_extern_kernel_nodes([]), V.set_debug_handler(DebugContext()):
            lowering.run(*inputs)
            yield lowering


def _is_product(node: Any) -> bool:
    """Return whether a node is a product of matrices, not another operation that Inductor leaves to a library."""
    return node.is_extern() and "mm" in str(getattr(node.node, "python_kernel_name", ""))


@cache
def _allow_cuda_without_triton() -> None:
    """Make the scheduler accept CUDA without Triton, which only the generated code needs."""
    from torch._inductor import scheduler

    def has_triton(*_device: object) -> bool:
        return True

    setattr(scheduler, "has_triton", has_triton)  # noqa: B010 - a plain assignment has a type error
