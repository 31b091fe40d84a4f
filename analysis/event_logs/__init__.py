"""Event logs as a whole run's: merged by time, told, compared, exported."""
