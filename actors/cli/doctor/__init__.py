"""`asterism doctor` checks the machine and one configuration."""
