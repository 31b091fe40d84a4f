"""The task of rStar2-Agent (arXiv 2508.20722, section 3): problems with a mathematical answer, solved with Python.

`dialogue.tools` selects the tools (asterism.policies.tools.python_tools). The grader compares answers with math-verify
in the sandbox (asterism.sandbox.inside.grader, docs/grading.md).
"""

from asterism.policies.tools.task_description import TaskDescription

MATH_PYTHON = TaskDescription(
    kind="tools",
    system="You are a helpful assistant that solves problems step by step, with the help of a Python tool.",
    system_without_tools="You are a helpful assistant that solves problems step by step.",
    tag_instruction="Reason inside <reason> </reason> and give the final answer inside {answer}.",
    instruction="Solve the problem below. Put the final answer inside {answer} and \\boxed{}.\n\n",
    has_boxed_answer=True,
)
