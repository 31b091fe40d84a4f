"""The `asterism` command: parses arguments, prints results. Each subcommand has its own module."""
