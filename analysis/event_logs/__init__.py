"""Event logs of a whole run: merged by time, described, compared, exported."""
