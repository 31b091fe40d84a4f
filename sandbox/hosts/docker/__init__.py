"""Runs fork servers in Docker containers."""
