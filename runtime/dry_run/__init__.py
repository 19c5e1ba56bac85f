"""A rank run with fake tensors: FLOPs, messages and live storage of its real program."""
