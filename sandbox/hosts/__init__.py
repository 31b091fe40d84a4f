"""Hosts of fork servers: this machine or containers."""
