"""What every serving node is made of: pool, engine loop, writers and receiver, configuration, main, services."""
