"""The launcher starts, monitors, restarts and stops the processes of a run, on one or several nodes."""
