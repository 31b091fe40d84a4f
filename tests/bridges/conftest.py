"""Ends the run before its first test if the environment of these tests is missing."""

import pytest

from tests.bridges.bridge_servers import PYTHON, ROOT

_MISSING = """{count} of the tests that were asked for start MCP and OpenEnv servers; there is no {python}.
To run them:
    make test-bridges, which makes it first (130 MB)
To leave them out on purpose:
    pytest -m 'not bridges'"""


def pytest_collection_finish(session: pytest.Session) -> None:
    count = sum(item.get_closest_marker("bridges") is not None for item in session.items)
    if count and not session.config.option.collectonly and not PYTHON.exists():
        raise pytest.UsageError(_MISSING.format(count=count, python=PYTHON.relative_to(ROOT)))
