"""`asterism data`: its subcommands."""
