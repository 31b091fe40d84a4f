"""The service `asterism sandbox serve`, and the client that every command with `--at FOLDER` or `--sandbox FOLDER` uses."""
