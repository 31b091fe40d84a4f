"""Replays deciders from the event logs of a run."""
