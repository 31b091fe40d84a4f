"""Checks of a running sandbox: escape attempts and load."""
