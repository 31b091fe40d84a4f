"""Programs next to the model's code, here or in a container. Standard library only."""
