"""The subcommands of `asterism data`, which clean, split, filter, inspect and render data files for runs."""
