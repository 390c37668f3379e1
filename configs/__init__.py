"""Config files of runs. `default.py` defines all options. Each other file changes some of them."""
