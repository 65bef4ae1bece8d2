"""Code that all other rooms import: ids, units, errors, random streams, machine events, jobs, config, journal."""
