"""The process that runs one call or one notebook."""
