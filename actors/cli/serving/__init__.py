"""`asterism export` writes the model of a run to a folder for other programs, and `asterism serve` serves it."""
