"""This side of the process group through which a server takes weights: rank 0, beside torch's default group if any.

The group is made of torch's public parts, with the names that SGLang's side finds (its init_custom_process_group and
torch's _new_process_group_helper): a TCP store, below it the group's name, the name and a slash, and the first kind of
device that the backend serves.

A collective blocks, for as long as the other side takes; and so does giving up a group in which one is pending, until
its time is over. So all of it happens on a daemon thread of the group's own, which nobody waits for.
"""

from __future__ import annotations

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


class Collective:
    """One group. After a failure it is of no use and has to be closed."""

    def __init__(self, name: str, backend: str, host: str, world_size: int, timeout_s: float) -> None:
        """`host` is this machine's address as the server reaches it. Nothing takes longer than `timeout_s`."""
        self.name = name
        self.backend = backend
        self.host = host
        self.world_size = world_size
        self._timeout = timedelta(seconds=timeout_s)
        self._listening = socket.create_server((host, 0))
        self.port: int = self._listening.getsockname()[1]
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._group: Any = None  # a ProcessGroupGloo or ProcessGroupNCCL, whose types do not say that they broadcast
        threading.Thread(target=self._serve, name=f"weights {name}", daemon=True).start()

    def join(self) -> asyncio.Future[None]:
        """Done when the server's ranks have joined too. They can connect from now on."""
        return self._call(self._join)

    def broadcast(self, tensors: Sequence[Tensor]) -> asyncio.Future[None]:
        """One after the other."""
        return self._call(lambda: self._broadcast(tensors))

    def close(self) -> None:
        """As soon as what is under way has ended. The other side's pending calls then fail."""
        self._calls.put(None)

    def _join(self) -> None:
        store: TCPStore | PrefixStore = TCPStore(
            self.host,
            self.port,
            self.world_size,
            is_master=True,
            timeout=self._timeout,
            wait_for_workers=False,
            master_listen_fd=self._listening.detach(),
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

    def _call(self, function: Callable[[], None]) -> asyncio.Future[None]:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[None] = loop.create_future()

        def answer(error: BaseException | None) -> None:
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
                failure = error.with_traceback(None)  # which would keep the group
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(answer, failure)

        self._calls.put(run)
        return future

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and the tensors that it holds
        self._group = None
        self._listening.close()
