"""The `asterism` command parses arguments and prints results. Each subcommand has its own module."""
