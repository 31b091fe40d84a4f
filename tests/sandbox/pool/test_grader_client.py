"""Verdicts without a grader process, and a grader that cannot start."""

import asyncio
import errno

import pytest

from sandbox.contract import SandboxFailure
from sandbox.hosts.local_host import LocalHost, LocalProcess
from sandbox.inside.wire.server_settings import ServerSettings
from sandbox.pool.grader_client import GraderClient, compare_plain


@pytest.mark.parametrize(
    ("answer", "truth", "verdict"),
    [
        ("42", "42", True),
        (" 42.0 ", "42", True),
        ("$-0$", "0", True),
        ("+7", "007.00", True),
        ("41", "42", False),
        (".5", "0.50", True),
        ("0.5", "0.05", False),
        ("9" * 10_000, "9" * 10_000, True),
        ("\\frac{1}{2}", "\\frac{1} {2}", True),
        ("\\frac{1}{2}", "0.5", None),
        ("1,000", "1000", None),
        ("", "3", None),
        ("x" * 5000, "3", False),
    ],
)
def test_plain_answers_need_no_grader_process(answer: str, truth: str, verdict: bool | None) -> None:
    assert compare_plain(answer, truth) is verdict


def test_gradings_fail_immediately_if_the_grader_cannot_start() -> None:
    class RefusingHost(LocalHost):
        async def launch(self, module: str, settings: ServerSettings) -> LocalProcess:
            raise OSError(errno.EMFILE, "Too many open files")

    async def scenario() -> None:
        grader = GraderClient(RefusingHost(), ServerSettings("bare", False, (), 1.0, 1, 1, 1, 1))
        for _ in range(2):
            with pytest.raises(SandboxFailure, match="the grader cannot start"):
                await asyncio.wait_for(grader.grade("x+1", "1+x"), 30)
        await grader.close()

    asyncio.run(scenario())
