"""Messages between processes, their transports and event logs, and services of each process."""
