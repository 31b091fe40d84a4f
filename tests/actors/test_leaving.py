from __future__ import annotations

import subprocess
import sys

import pytest

LEFT_ALONE = """
import asyncio
from datetime import timedelta

import torch
from torch.distributed import PrefixStore, ProcessGroupGloo, TCPStore

from actors.process import leave
from engine.sglang.weights.collective import Collective


async def main():
    ours = Collective("x", "gloo", "127.0.0.1", 2, 600.0)
    joining = ours.join()

    def join():
        store = TCPStore("127.0.0.1", ours.port, 2, timeout=timedelta(seconds=60))
        for prefix in ("x", "x/", "cpu/"):
            store = PrefixStore(prefix, store)
        return ProcessGroupGloo(store, 1, 2, timedelta(seconds=60))

    other = await asyncio.to_thread(join)
    await joining
    ours.broadcast([torch.zeros(1_000_000)])
    ours.close()
    return other


other = asyncio.run(main())
print("said", end="")
leave(3)
"""


@pytest.mark.slow
def test_a_collective_whose_other_side_never_answers_does_not_change_how_a_process_ends() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT_ALONE], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "said", "")
