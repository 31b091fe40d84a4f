"""Plans a run's memory, storage and time (`asterism plan`) from its configuration and config.json, without torch."""
