"""`asterism sandbox serve`, and its client, which each command with `--at FOLDER` or `--sandbox FOLDER` uses."""
