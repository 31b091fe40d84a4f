"""The layers of a configuration: file, stage and overrides, merged into tables of the schema."""
