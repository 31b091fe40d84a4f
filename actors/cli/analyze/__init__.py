"""The `asterism analyze` command."""
