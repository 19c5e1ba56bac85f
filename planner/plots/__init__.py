"""Figures: predicted against measured, breakdowns of time and memory, timelines, scaling.

Only this package imports matplotlib, and never its `pyplot`: functions take records, return a
`Figure` and keep no state. A new figure is one function here and one name in `planner/cli/plot.py`.

    style       colours, formats, writing
    breakdown   step time by term, memory by pipeline rank
    timeline    the pipeline's schedule in seconds
    accuracy    predicted against measured
    scaling     tokens/s/GPU against GPUs
    overview    one plan on one page
"""
