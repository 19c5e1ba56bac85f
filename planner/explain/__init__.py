"""Explain: why this plan, why not another, what if the machine or the job were different.

reasons      what limits a layout, and the terms in which two layouts differ
question     one layout beside the plan's (`--why-not tp=8,pp=2`)
margins      what a longer sequence, another batch or other GPUs break
advice       what a ranking alone would not say
what_if      another machine or job: the new best plan, and from which value on it wins
sensitivity  which figure of the machine moves the step most
formulas     the formulas behind the largest costs, with numbers in

Everything returns records; the words are made here too, because the words are the point.
"""
