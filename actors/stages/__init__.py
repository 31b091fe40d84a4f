"""[[stages]]: each stage is a run of its own, in a folder of the whole run, and continues the one before."""
