"""The lab: planning, simulation, measurement and their commands. No process that serves imports it."""
