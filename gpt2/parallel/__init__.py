"""Spreading one program over devices: the mesh, the rules, and two backends with one interface."""
