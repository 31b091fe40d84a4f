"""The event log of a process: a SQLite file, its writer, reader, compression and retention."""
