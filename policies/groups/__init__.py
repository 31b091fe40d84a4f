"""Groups of trajectories: collection, rejection, RoC, advantages, staleness."""
