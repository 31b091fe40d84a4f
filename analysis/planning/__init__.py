"""`asterism plan`: memory, storage and time of a run, from its configuration and the model's config.json, without torch."""
