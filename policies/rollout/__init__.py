"""The deciders of a rollout process: the state machine of each trajectory, its transitions, and executors."""
