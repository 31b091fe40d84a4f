"""Checks a task without a model: plays scripted turns in its host process, and reports problems with remedies."""
