"""How messages travel between processes: addresses, authentication, reliable streams, ZeroMQ."""
