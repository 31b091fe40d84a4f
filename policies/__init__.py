"""Makes pure decisions: no clock, no randomness, no I/O. Time and random draws arrive with the event."""
