"""Seconds of a step: ops priced, blocks summed to stages, stages run as a pipeline."""
