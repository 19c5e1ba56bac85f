"""`python -m planner`: the same as the console command `planner`."""

from planner.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
