"""Prompts, tools, environments and rewards. Other folders get the built-in tasks from here, and name none of them."""

from asterism.tasks.math_python import MATH_PYTHON

DEFAULT_TASK = MATH_PYTHON  # of a task without an import path
PREPARE_TINY = "asterism.tasks.tiny.prepare"  # the program that makes the model of [tiny], and the data of its own task
