"""Tools that other packages share, for arrays, parameters, files and processes."""
