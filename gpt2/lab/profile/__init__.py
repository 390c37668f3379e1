"""Show where the time of training steps goes, from a trace of these steps."""
