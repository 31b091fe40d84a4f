"""Metric sinks: they deliver the records of metrics.jsonl to TensorBoard and other backends.

Each sink is a process of its own, which reads the file; the run never waits for it.
"""
