"""The service `asterism sandbox serve` has a client here, which each command with `--at` or `--sandbox FOLDER` uses."""
