"""Requests to inference servers over HTTP, for every kind of engine that is a server."""
