"""The lab's commands: plan, simulate, calibrate, validate and bench."""
