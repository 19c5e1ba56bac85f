"""A run on disk: blocks of whole tensors under checksums, in folders that survive a kill."""
