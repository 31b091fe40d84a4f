"""Prepares data files for runs: cleans, splits, inspects and renders them. The subcommands of `asterism data`."""
