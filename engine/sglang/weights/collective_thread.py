"""Runs rank 0 of the process group that transfers weights to a server. It is not torch's default group.

The group is built from torch's public parts. Its store prefixes match those of SGLang's
init_custom_process_group and torch's _new_process_group_helper: the group's name, the name and a
slash, and the backend's first device type.

A collective blocks until the other side takes part, and closing a group with a pending collective
blocks until its timeout. So both run on a daemon thread per group, which is never joined.
"""

import asyncio
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

_DEVICES = {"gloo": "cpu", "nccl": "cuda"}


class CollectiveThread:
    """A thread with one process group. After a failure the group must be closed."""

    def __init__(self, name: str, backend: str, host: str, world_size: int, timeout_s: float) -> None:
        """`host`: this machine's address for the server. `timeout_s`: limit of each operation."""
        self.name = name
        self.backend = backend
        self.host = host
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._listener = socket.create_server((host, 0))
        self.port: int = self._listener.getsockname()[1]
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._group: Any = None  # ProcessGroupGloo or -NCCL; their stubs lack `broadcast`
        threading.Thread(target=self._run_calls, name=f"weights {name}", daemon=True).start()

    def join(self) -> asyncio.Future[None]:
        """Return a future that is done when the server's ranks have joined; these ranks can connect from now on."""
        return self._submit(self._join)

    def broadcast(self, tensors: Sequence[Tensor]) -> asyncio.Future[None]:
        """Broadcast the tensors in order."""
        return self._submit(lambda: self._broadcast(tensors))

    def close(self) -> None:
        """Close the group after the current operation. Pending calls of the other side fail."""
        self._calls.put(None)

    def _join(self) -> None:
        store: TCPStore | PrefixStore = TCPStore(
            self.host,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=self._listener.detach(),
        )
        for prefix in (self.name, f"{self.name}/", f"{_DEVICES[self.backend]}/"):
            store = PrefixStore(prefix, store)
        if self.backend == "gloo":
            self._group = dist.ProcessGroupGloo(store, 0, self.world_size, timeout=self._timeout)
        else:
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = self._timeout
            self._group = dist.ProcessGroupNCCL(store, 0, self.world_size, options)

    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        device = torch.device(_DEVICES[self.backend])
        sent = [tensor.to(device) for tensor in tensors]
        for work in [self._group.broadcast(tensor, 0) for tensor in sent]:
            work.wait(self._timeout)
        if device.type == "cuda":
            torch.cuda.synchronize()

    def _submit(self, function: Callable[[], None]) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def resolve(error: BaseException | None) -> None:
            if future.done():
                return
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)

        def run() -> None:
            failure: BaseException | None = None
            try:
                function()
            except Exception as error:
                failure = error.with_traceback(None)  # the traceback would keep the group alive
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(resolve, failure)

        self._calls.put(run)
        return future

    def _run_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # frees the tensors of the call
        self._group = None
        self._listener.close()
