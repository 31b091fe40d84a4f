"""Sends requests over HTTP to inference servers, for every kind of engine that is a server."""
