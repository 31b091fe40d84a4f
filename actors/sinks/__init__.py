"""Metric sinks deliver the records of metrics.jsonl to TensorBoard, W&B, MLflow and Trackio.

Each sink is a separate process, which reads the file; the run never waits for it.
"""
