"""Health checks: pure functions of the metrics of the last steps."""
