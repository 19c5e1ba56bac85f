"""What no partition of the layers beats: lower bounds of time and memory, table by table."""
