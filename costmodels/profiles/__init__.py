"""Hardware profiles as files: their keys, reading and writing."""
