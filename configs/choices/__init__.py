"""Tables of the configuration's choices: a new engine kind, weight transfer, metric sink or optimizer is one record here."""
