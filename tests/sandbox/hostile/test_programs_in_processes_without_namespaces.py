"""The hostile programs in processes without namespaces."""

import pytest

from tests.sandbox.hostile.encounters import test_a_program_that as test_a_program_that

pytestmark = [pytest.mark.slow, pytest.mark.nightly]
ARENA = "process-without-namespaces"
