"""These checks examine a run's inputs and the machine, before anything is created."""
