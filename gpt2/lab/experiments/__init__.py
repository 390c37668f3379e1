"""Code that sweeps, ledgers and comparisons share: arms, runs, results and report pages."""
