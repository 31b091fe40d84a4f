"""The decider of a rollout process: trajectories as state machines, their transitions, and executors."""
