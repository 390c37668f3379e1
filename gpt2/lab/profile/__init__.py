"""From a trace of training steps to what costs most of their time."""
