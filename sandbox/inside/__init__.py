"""What runs beside a model's code, on this machine or in a container: the standard library and nothing else."""
