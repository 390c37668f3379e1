"""How fast a step is, alone or beside PyTorch."""
