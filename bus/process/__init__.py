"""Services of every process: structured log, heartbeat, exit reason, death with its parent."""
