"""What reproduces each published number: one command, one committed table."""
