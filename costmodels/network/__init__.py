"""A network as blocks of ops in shapes of one rank: what is done, not how long it takes."""
