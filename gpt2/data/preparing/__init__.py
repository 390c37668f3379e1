"""Documents -> tokens in a folder, written once."""
