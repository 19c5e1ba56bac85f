"""A training run around the executor: flags, data, measurements, what ends it."""
