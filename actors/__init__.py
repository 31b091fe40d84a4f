"""The processes: runtime, supervision, the actors, launcher, replay, command line."""
