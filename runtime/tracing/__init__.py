"""What happened when, beside what was predicted: `train.py --trace`."""
