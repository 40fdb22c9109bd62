"""The lab: planning, simulation, measurement and their commands. No serving process imports it."""
