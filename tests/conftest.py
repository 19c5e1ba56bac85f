"""What holds for every test."""

from hypothesis import settings

# Tests judge results, never seconds: on a busy machine an example may take long.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
