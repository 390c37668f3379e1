"""What sweeps, ledgers and comparisons share: arms, their runs, what runs yield, and pages."""
