"""What a rank executes and sends in a step, in whole numbers: `planner verify` compares."""
