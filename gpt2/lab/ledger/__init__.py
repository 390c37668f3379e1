"""A ledger of ideas: each is tried against the best so far, and few false ones are kept."""
