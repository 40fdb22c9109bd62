"""Types that all layers of the code share: records of a step, protocols, errors, and the machine's resources."""
