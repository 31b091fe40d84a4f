"""Groups of trajectories: collection, rejection, Resample-on-Correct (RoC), advantages, staleness."""
