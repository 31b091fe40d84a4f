"""Transfers weights from the learner to embedded engines: shared memory on one node, TCP between nodes."""
