"""Measuring this machine: kernels and collectives timed on all ranks at once, fitted to a profile.

stopwatch   seconds per call of what every rank does at the same time
kernels     products, attention, passes over memory, empty kernels
transfers   collectives and messages by size and group; what overlap costs
fitting     samples to the constants of the cost model's own formulas
profile     `measure_profile`: fork the ranks, measure, fit, one HardwareProfile

sleeping    programs whose computation is replaced by sleeps, for more ranks than cores
"""
