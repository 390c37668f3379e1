"""Documents -> tokens -> records -> batch(step)."""
