"""Units: SI inside, suffixes only at the edges (files, flags, output).

GB is 10**9 bytes, GiB is 2**30 bytes. A device sold as "80 GB" holds 80 GiB, less what the
driver keeps. Conversions happen once, in loaders and printers, with the names below.
"""

GB = 10**9
KIB = 2**10
MIB = 2**20
GIB = 2**30
TFLOP = 10**12
US = 1e-6
