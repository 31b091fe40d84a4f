"""The report of one case of the fake CUDA suite. The test process imports this module, but must not import torch."""

import os
import subprocess
import sys

import msgspec


class PartCount(msgspec.Struct, frozen=True):
    kernels: int
    bytes: int
    flops: float


class CaseReport(msgspec.Struct, frozen=True, kw_only=True):
    error: str = ""  # end of the traceback; empty if the case succeeded
    updates: int = 1
    syncs: list[str] = []  # each wait for the GPU, as module:function
    captured_waits: list[str] = []  # waits for the GPU in a graph, which must not contain waits
    pageable_copies: list[str] = []  # copies from host memory that is not page-locked
    blocking_copies: list[str] = []  # copies in either direction for which the host waits
    mixed_devices: list[str] = []  # operation on tensors of several devices, and its place in the code
    collectives: list[str] = []  # collectives of tensors that are empty or not on the GPU
    sent: int = 0  # number of tensors in collectives
    parts: dict[str, PartCount] = {}  # counts by benchmarks.support.fake_cuda.fake_steps.Part
    peak_bytes: int = 0
    peak_place: str = ""

    @property
    def kernels(self) -> int:
        return sum(part.kernels for part in self.parts.values())


def run_groups(*groups: str) -> dict[str, CaseReport]:
    """Run groups of cases of run_cases.py in one process with fake CUDA, because its start takes 4 s."""
    command = [sys.executable, "-m", "benchmarks.support.fake_cuda", "tests.engine.cuda.run_cases", *groups]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, f"exit code {done.returncode}: {done.stderr[-4000:]}"
    return msgspec.json.decode(done.stdout.splitlines()[-1], type=dict[str, CaseReport])
