"""Bytes of a rank at its fullest moment, by part."""
