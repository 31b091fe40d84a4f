"""Transport of messages between processes: addresses, authentication, reliable streams, ZeroMQ."""
