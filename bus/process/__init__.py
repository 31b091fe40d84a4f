"""Services of every process: structured log, heartbeat, exit reason, exit together with the parent."""
