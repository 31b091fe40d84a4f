"""The keys of a configuration, one Struct per table: asterism.configs.schema.run_config has the whole tree."""
