"""Plans of runs that do not run: what a step takes, and which layouts fit."""
