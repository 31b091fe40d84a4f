"""Prompts, tools, environments and rewards. Other folders import the built-in tasks only through the names below."""

from asterism.tasks.math_python import MATH_PYTHON

DEFAULT_TASK = MATH_PYTHON  # description of a task without an import path
