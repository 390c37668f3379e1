"""From a profile to a cause: traces a few steps, and says where their time goes."""
