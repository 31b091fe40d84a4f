"""The arbiter: grants trajectories KV cache on engines."""
