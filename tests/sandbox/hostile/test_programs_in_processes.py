"""The hostile programs in processes with namespaces."""

import pytest

from tests.sandbox.hostile.encounters import test_a_program_that as test_a_program_that

pytestmark = [pytest.mark.slow]
ARENA = "process"
