"""Running a model's code, and grading its answers, where neither can do harm."""
