"""What all floors share: records of a step, protocols, errors, figures of the machine."""
