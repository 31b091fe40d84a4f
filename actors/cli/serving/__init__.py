"""`asterism export` and `asterism serve`: the model of a run as a folder for other programs, and as a server."""
