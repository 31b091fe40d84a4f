"""Finding damaged files: manifests of digests."""
