"""What people see of a run beside the terminal: metrics, experiment trackers, and the report of its journals."""
