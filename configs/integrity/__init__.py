"""Finds damaged files by manifests of digests."""
