"""`asterism doctor`: checks of the machine and of one configuration."""
