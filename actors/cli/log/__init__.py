"""`asterism log` reads, replays, compares and forks the event logs of a run."""
