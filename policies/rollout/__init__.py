"""One rollout process: the state machine of each trajectory and its transitions."""
