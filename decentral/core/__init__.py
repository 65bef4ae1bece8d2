"""What every room names: ids, units, errors, chance, the contract of a machine, jobs, config, journal."""
