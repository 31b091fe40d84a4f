"""Programs that run next to the model's code, here or in a container. They use the standard library only."""
