"""Pure decisions: no clock, no randomness, no I/O. Time and draws arrive with the event."""
