"""Subcommands of `asterism data`."""
