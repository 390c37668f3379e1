"""The lab: programs that look at runs from outside. Nothing outside of this folder imports it."""
