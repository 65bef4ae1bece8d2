"""The floor that everything stands on: names, units, errors, chance, machines, config, journal."""
