"""Tools as typed functions: their schemas, the check of a call's arguments, and the Python tools."""
