"""One thread: tests fork ranks, and OpenMP's threads do not survive a fork."""

import torch

torch.set_num_threads(1)
