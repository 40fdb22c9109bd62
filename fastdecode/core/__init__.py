"""Types that all floors share: records of a step, protocols, errors, and the machine's resources."""
