"""Plans of runs that do not run: what a step takes, by compilers, and which layouts fit."""
