"""Statistics and files of evaluations."""
