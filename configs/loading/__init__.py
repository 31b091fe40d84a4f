"""Merges the layers of a configuration, file, stage and overrides, into tables of the schema."""
