"""Config files of runs. `default.py` defines all options, and the other files change some."""
