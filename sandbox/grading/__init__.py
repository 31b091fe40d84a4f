"""Reads answers without math-verify: notation, numbers, units, equations, and choices. docs/grading.md lists the rules."""
